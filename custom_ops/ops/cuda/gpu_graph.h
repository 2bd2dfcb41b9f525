// Kernels, library calls and fills, as one CUDA graph whose addresses may change from launch to
// launch. Knows no TensorFlow.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
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
// kernel and of zeros in its node, of a library call by capturing it again, which takes the host up
// to 0.1 ms a call. An allocator gives a step a few sets of addresses in turn, so some versions of
// the graph are kept: the one runs of which the fewest calls have to be captured again. What was
// launched before keeps its own words, and one launch of a version begins when the one before has
// ended: so any number of launches, from any threads, may be in flight.
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
  // One version, whose nodes have `words`.
  struct Version {
    cuda::Graph graph = nullptr;
    cuda::GraphExec exec = nullptr;
    std::vector<cuda::GraphNode> nodes;  // of the steps
    std::vector<GraphWords> words;
  };

  absl::StatusOr<Version*> VersionFor(absl::Span<const GraphWords> words);
  int CallsToCapture(const Version& version, absl::Span<const GraphWords> words) const;
  absl::Status Make(absl::Span<const GraphWords> words);
  absl::Status Fill(absl::Span<const GraphWords> words, Version* made) const;
  absl::Status Add(const GraphStep& step, const GraphWords& words, Version* version) const;
  absl::Status Patch(absl::Span<const GraphWords> words, Version* version) const;
  absl::Status PatchNode(const GraphStep& step, const GraphWords& words, cuda::GraphExec exec,
                         cuda::GraphNode node) const;
  absl::Status Capture(const GraphStep& step, const GraphWords& words, cuda::Graph* graph) const;
  absl::Status Drop(Version* version) const;

  GpuLink* const link_;
  const std::vector<GraphStep> steps_;
  std::mutex mutex_;
  std::list<Version> versions_;
};

}  // namespace tfmem
