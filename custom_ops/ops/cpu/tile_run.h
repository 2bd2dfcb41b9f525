// Runs a program over tensors in memory, tile by tile.
//
//   auto prepared = PreparedExpression::Prepare(expression, axes, shapes, ChosenKernels());
//   (*prepared)->Run(inputs, outputs, {threads, schedule}, nullptr);
//
// Preparing compiles the program for the sizes of its axes and tensors; what is prepared runs any
// number of times, several at a time, too.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "custom_ops/ops/cpu/cpu_kernels.h"
#include "custom_ops/ops/cpu/expression.h"
#include "custom_ops/ops/cpu/phases.h"
#include "custom_ops/ops/cpu/sized_expression.h"

namespace tfmem {

struct IndexFailure;
struct TilePlan;
struct TileProgram;

// Where tiles run beside the thread that calls. That thread does its share, and all shares if the
// pool has no thread to give: it never waits for a share that no thread has begun (phases.h).
struct TileThreads {
  int count = 1;      // the calling thread among them
  Schedule schedule;  // enqueues a closure on a pool; unused if the count is 1
};

class PreparedExpression {
 public:
  // `axes` are the sizes of the program's axes (AxisSizes), `shapes` those of the tensors that it
  // reads. Keeps `kernels`, and nothing else of what is given.
  //
  // InvalidArgument if the sizes do not fit the program, or an index would be out of bounds.
  static absl::StatusOr<std::unique_ptr<const PreparedExpression>> Prepare(
      const Expression& expression, const std::vector<int64_t>& axes,
      const std::vector<Shape>& shapes, const InstructionSet& kernels);

  ~PreparedExpression();

  const std::vector<Shape>& output_shapes() const { return output_shapes_; }
  // Bytes of each input and of each output.
  const std::vector<int64_t>& input_bytes() const { return input_bytes_; }
  const std::vector<int64_t>& output_bytes() const { return output_bytes_; }

  // What one thread takes for a run, roughly.
  double work_ns() const;

  // What a run on so many threads needs beside inputs and outputs; whole cache lines.
  int64_t WorkspaceBytes(int threads) const;

  // Whether an output may have the memory of an input, and perhaps others of other inputs. It holds
  // if each number of the input is read where it lies before the output's number is written there:
  //  - the input is read at the index at which the output is written, and nowhere else: by the
  //    stage that writes, before it does, or by stages of earlier levels, at any index;
  //  - both have the same dtype;
  //  - no index that is a value is checked at the same level or later, so that a run that fails has
  //    written nothing there.
  bool MayShare(int input, int output) const;

  // Tensors are dense, in row-major order; booleans are bytes of 0 and 1. `workspace` is as large
  // as WorkspaceBytes(threads.count) says and begins at a multiple of 64; null: allocated here.
  // Results depend on the sizes alone, not on the threads.
  //
  // InvalidArgument if an index that is a value is out of bounds; the outputs are anything then,
  // but for those for which MayShare holds, if they share. ResourceExhausted if there is no memory.
  absl::Status Run(absl::Span<const void* const> inputs, absl::Span<void* const> outputs,
                   const TileThreads& threads, void* workspace) const;

  const TileProgram& program() const;

 private:
  PreparedExpression();
  // How many of the threads are worth their while.
  int UsefulThreads(int threads) const;
  absl::Status OutOfBounds(const IndexFailure& failure) const;

  std::unique_ptr<const TilePlan> plan_;
  std::vector<Shape> output_shapes_;
  std::vector<int64_t> input_bytes_;
  std::vector<int64_t> output_bytes_;
  std::vector<int> origin_;  // of the plan's axes: see SizedExpression
  std::vector<int64_t> step_;
};

}  // namespace tfmem
