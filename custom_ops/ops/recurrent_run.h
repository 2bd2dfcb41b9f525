// TfmemRecurrent's way over a sequence on the CPU.
//
// Processors divide the hidden units among themselves, so that each one's part of the weights stays
// in its own cache for the whole sequence; they meet once for each stage of a step. Within its part
// a processor first multiplies a group of rows, then interprets the stage's code over tiles that
// fit its innermost cache.
#ifndef TFMEM_CUSTOM_OPS_OPS_RECURRENT_RUN_H_
#define TFMEM_CUSTOM_OPS_OPS_RECURRENT_RUN_H_

#include <cstdint>
#include <type_traits>
#include <vector>

#include "custom_ops/ops/cpu_kernels.h"
#include "custom_ops/ops/recurrent.h"
#include "custom_ops/ops/step_program.h"

namespace tfmem {

// Half precision is computed in single precision.
template <typename T>
using RealFor = std::conditional_t<std::is_same_v<T, double>, double, float>;

// How a call is cut. A share is a direction, a range of rows and a range of units.
struct RecurrentCut {
  int64_t panel = 0;  // units in a panel of weights
  int64_t tiles = 0;  // panels that cover the units
  int threads = 1;
  int unit_parts = 1;
  int row_parts = 1;
  int64_t group_width = 0;  // units in a group: a multiple of `panel`
  int64_t group_rows = 0;   // rows that are multiplied at a time
  int64_t tile_rows = 0;    // rows that are interpreted at a time

  int parts() const { return unit_parts * row_parts; }
  int64_t stride() const { return tiles * panel; }  // of a row of states
};

RecurrentCut CutRecurrentCall(const StepProgram& program, int64_t panel, int64_t units,
                              int64_t batch, int directions, int threads);

template <typename T>
class RecurrentRun {
 public:
  using Real = RealFor<T>;

  RecurrentRun(const RecurrentAttributes& attributes, const StepProgram& program,
               const RecurrentCall& call, const InstructionSet& kernels, int threads);

  int threads() const { return cut_.threads; }
  int shares() const { return call_.directions.size() * cut_.parts(); }
  int64_t phases() const;
  // How much memory the run needs, and where it is; aligned to 64 bytes.
  int64_t workspace_bytes() const { return workspace_size_ * sizeof(Real); }
  void SetWorkspace(void* workspace) { workspace_ = static_cast<Real*>(workspace); }

  // Does one share of one phase: the first prepares, the last gives the final states out.
  void Work(int64_t phase, int share) const;

 private:
  using Code = Instruction::Kind;

  // A share, or a part of one that is worked on at a time.
  struct Range {
    int share = 0;
    int direction = 0;
    int64_t first_row = 0;
    int64_t rows = 0;
    int64_t first_unit = 0;
    int64_t width = 0;  // a multiple of the panel, so it may go past the last unit

    int64_t end_row() const { return first_row + rows; }
    int64_t end_unit() const { return first_unit + width; }
  };
  struct Step {
    int64_t number = 0;  // in the order of walking
    int64_t time = 0;    // in the tensors
  };

  Range RangeOf(int share) const;
  int64_t Valid(const Range& range) const;  // units of the range that there are
  Step StepAt(int64_t number, int direction) const;

  void Prepare(const Range& range) const;
  void PackWeights(const Range& range) const;
  void PackPanel(const Range& range, const WeightBlock& block, int64_t tile, Real* panel) const;
  void Finish(const Range& range) const;
  void RunStage(const Range& share, const Step& step, const Stage& stage) const;
  void Multiply(const Range& group, const Step& step, const Stage& stage) const;
  void Interpret(const Range& group, const Range& tile, const Step& step, const Stage& stage) const;
  struct Tile;
  void Load(const Instruction& instruction, const Tile& tile) const;
  void StoreTo(const Instruction& instruction, const Tile& tile) const;
  void LoadScalar(const Instruction& instruction, const Tile& tile) const;
  void StoreScalar(const Instruction& instruction, const Tile& tile) const;
  void ToReal(const T* source, Real* target, int64_t count) const;
  void FromReal(const Real* source, T* target, int64_t count) const;

  // Places in the workspace.
  int64_t Reserve(int64_t numbers);
  Real* Panel(int direction, int64_t tile, int block) const;
  Real* StateAt(int direction, int64_t step, int state) const;
  Real* Carried(int direction, int index) const;
  Real* CarriedScalar(int share, int index) const;
  Real* RowSums(int direction, int index) const;
  Real* Products(int share, int product) const;
  Real* WideTile(int share, int location) const;
  Real* ScalarTile(int share, int location) const;

  const RecurrentAttributes& attributes_;
  const StepProgram& program_;
  const RecurrentCall& call_;
  const InstructionSet& instruction_set_;
  const CpuKernels<Real>& kernels_;
  const RecurrentCut cut_;
  const int64_t units_;

  Real* workspace_ = nullptr;
  int64_t workspace_size_ = 0;
  int64_t panels_ = 0;
  int64_t states_ = 0;
  int64_t carried_ = 0;
  int64_t carried_scalars_ = 0;
  int64_t row_sums_ = 0;
  int64_t products_ = 0;
  int64_t wide_tiles_ = 0;
  int64_t scalar_tiles_ = 0;
};

}  // namespace tfmem

#endif  // TFMEM_CUSTOM_OPS_OPS_RECURRENT_RUN_H_
