// Kernels, library calls and fills, as one CUDA graph whose addresses may change from launch to
// launch. Knows no TensorFlow.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "custom_ops/ops/cuda/gpu_kernel.h"

namespace tfmem {

using GraphWords = std::vector<uint64_t>;

struct GraphStep {
  // A kernel, whose parameter is the words.
  std::shared_ptr<const GpuKernel> kernel;
  Grid grid;
  // Or what a library enqueues, at the addresses that the words are. It must not wait.
  std::function<absl::Status(cuda::Stream, absl::Span<const uint64_t>)> enqueue;
  // Or so many bytes of zeros, at the one address that is given.
  int64_t zeros = 0;
  std::vector<int> after;  // steps, all earlier ones, that have to end before this one begins
};

// Made at the first launch. A launch sets the words that are not those of the launch before: of a
// kernel and of zeros in its node, of a library call by capturing it again. What was launched
// before keeps its own, and one launch of a graph begins when the one before has ended: so any
// number of launches, from any threads, may be in flight.
class GpuGraph {
 public:
  GpuGraph(GpuLink* link, std::vector<GraphStep> steps) : link_(link), steps_(std::move(steps)) {}
  ~GpuGraph();
  GpuGraph(const GpuGraph&) = delete;
  GpuGraph& operator=(const GpuGraph&) = delete;

  // Enqueues all steps on `stream`; `words` are those of each step. Where a graph cannot be updated
  // to them, it is made again. After a failure nothing was enqueued, and the next launch makes the
  // graph again. ResourceExhausted when out of memory.
  absl::Status Launch(cuda::Stream stream, absl::Span<const GraphWords> words);

 private:
  absl::Status Make(absl::Span<const GraphWords> words);
  absl::Status Add(const GraphStep& step, const GraphWords& words, cuda::GraphNode* node) const;
  absl::Status Patch(absl::Span<const GraphWords> words);
  absl::Status PatchNode(const GraphStep& step, const GraphWords& words, cuda::GraphNode node);
  absl::Status Capture(const GraphStep& step, const GraphWords& words, cuda::Graph* graph) const;
  absl::Status Drop();

  GpuLink* const link_;
  const std::vector<GraphStep> steps_;
  std::mutex mutex_;
  cuda::Graph graph_ = nullptr;
  cuda::GraphExec exec_ = nullptr;
  std::vector<cuda::GraphNode> nodes_;  // of the steps
  std::vector<GraphWords> words_;       // that the nodes have
};

}  // namespace tfmem
