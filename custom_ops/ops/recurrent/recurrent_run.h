// TfmemRecurrent's way over a sequence on the CPU.
//
// Threads divide the hidden units among themselves, so that each one's part of the weights stays in
// its core's own cache for the whole sequence; they wait for each other once for each stage of a
// step. Within its part a thread first multiplies a group of rows, then interprets the stage's code
// over tiles that fit its innermost cache.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "Eigen/Core"
#include "custom_ops/ops/cpu/cpu_kernels.h"
#include "custom_ops/ops/recurrent/recurrent.h"
#include "custom_ops/ops/recurrent/recurrent_cut.h"
#include "custom_ops/ops/recurrent/recurrent_workspace.h"
#include "custom_ops/ops/recurrent/step_program.h"

namespace tfmem {

// Half precision is computed in single precision.
template <typename T>
using RealFor = std::conditional_t<std::is_same_v<T, double>, double, float>;

// A step, by its number in the order of walking and by its index in the tensors.
struct RecurrentStep {
  int64_t number = 0;
  int64_t time = 0;
};

// All that the parts of a call read.
template <typename T>
struct RecurrentRun {
  using Real = RealFor<T>;

  const RecurrentAttributes& attributes;
  const StepProgram& program;
  const RecurrentCall& call;
  const InstructionSet& instruction_set;
  const CpuKernels<Real>& kernels;
  const RecurrentCut cut;
  RecurrentWorkspace<Real> workspace;

  RecurrentRun(const RecurrentAttributes& attributes, const StepProgram& program,
               const RecurrentCall& call, const InstructionSet& instruction_set, int threads);

  int64_t phases() const;
  // Does one share of one phase: the first prepares, the last gives the final states out.
  void Work(int64_t phase, int share) const;

  void ToReal(const T* source, Real* target, int64_t count) const;
  void FromReal(const Real* source, T* target, int64_t count) const;

 private:
  RecurrentStep StepAt(int64_t number, int direction) const;
  void Prepare(const RecurrentRange& range) const;
  // The weights between all units and those of a tile, [units, panel].
  struct Weights {
    const Real* first = nullptr;
    int64_t stride = 0;  // of a row
  };
  Weights WeightsOf(int direction, int block, int64_t tile) const;
  const T* BlockAt(int direction, const WeightBlock& block) const;
  int64_t BlockStride(const WeightBlock& block) const;
  bool IsPacked(const WeightBlock& block, int64_t tile) const;
  void PackPanel(int direction, const WeightBlock& block, int64_t tile, Real* panel) const;
  void Finish(const RecurrentRange& range) const;
  void RunStage(const RecurrentRange& share, const RecurrentStep& step, int stage) const;
  void Multiply(const RecurrentRange& group, const RecurrentStep& step, int stage) const;
};

// Runs a stage's code over one tile of a group whose products are there.
template <typename T>
void InterpretTile(const RecurrentRun<T>& run, const RecurrentRange& group,
                   const RecurrentRange& tile, const RecurrentStep& step, const TileStage& stage);

template <typename T>
void RecurrentRun<T>::ToReal(const T* source, Real* target, int64_t count) const {
  if constexpr (std::is_same_v<T, Real>) {
    std::memcpy(target, source, count * sizeof(T));
  } else if constexpr (std::is_same_v<T, Eigen::half>) {
    instruction_set.half_to_float(reinterpret_cast<const uint16_t*>(source), target, count);
  } else {
    instruction_set.bfloat16_to_float(reinterpret_cast<const uint16_t*>(source), target, count);
  }
}

template <typename T>
void RecurrentRun<T>::FromReal(const Real* source, T* target, int64_t count) const {
  if constexpr (std::is_same_v<T, Real>) {
    std::memcpy(target, source, count * sizeof(T));
  } else if constexpr (std::is_same_v<T, Eigen::half>) {
    instruction_set.float_to_half(source, reinterpret_cast<uint16_t*>(target), count);
  } else {
    instruction_set.float_to_bfloat16(source, reinterpret_cast<uint16_t*>(target), count);
  }
}

}  // namespace tfmem
