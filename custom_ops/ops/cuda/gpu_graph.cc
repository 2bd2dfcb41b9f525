#include "custom_ops/ops/cuda/gpu_graph.h"

#include <map>

#include "custom_ops/ops/process_wide.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

// Streams on which library calls are captured, one for each context. Nothing ever runs on them.
struct CaptureStreams {
  std::mutex mutex;
  std::map<cuda::Context, cuda::Stream> streams;
};

void* Address(const GraphWords& words) {
  return const_cast<uint64_t*>(words.data());  // which the driver copies
}

cuda::MemsetNodeParameters Zeros(const GraphStep& step, const GraphWords& words) {
  cuda::MemsetNodeParameters parameters;
  parameters.to = words[0];
  parameters.width = step.zeros;
  return parameters;
}

}  // namespace

GpuGraph::~GpuGraph() {
  const cuda::ScopedContext current(link_->driver(), link_->context());
  cuda::ReportLostError(current.status().ok() ? Drop() : current.status());
}

absl::Status GpuGraph::Launch(cuda::Stream stream, absl::Span<const GraphWords> words) {
  const cuda::Driver& driver = link_->driver();
  const cuda::ScopedContext current(driver, link_->context());
  if (!current.status().ok()) return current.status();
  std::lock_guard<std::mutex> lock(mutex_);
  absl::Status status;
  if (exec_ != nullptr && !Patch(words).ok()) status = Drop();  // another shape of a library's call
  if (status.ok() && exec_ == nullptr) status = Make(words);
  if (status.ok()) status = cuda::Check(driver.cuGraphLaunch(exec_, stream), "cuGraphLaunch");
  if (!status.ok()) cuda::ReportLostError(Drop());
  return status;
}

absl::Status GpuGraph::Make(absl::Span<const GraphWords> words) {
  const cuda::Driver& driver = link_->driver();
  TFMEM_CUDA_RETURN_IF_ERROR(driver, cuGraphCreate, &graph_, 0);
  for (size_t i = 0; i < steps_.size(); ++i) {
    cuda::GraphNode node = nullptr;
    TFMEM_RETURN_IF_ERROR(Add(steps_[i], words[i], &node));
    nodes_.push_back(node);
  }
  TFMEM_CUDA_RETURN_IF_ERROR(driver, cuGraphInstantiateWithFlags, &exec_, graph_, 0);
  words_.assign(words.begin(), words.end());
  return absl::OkStatus();
}

absl::Status GpuGraph::Add(const GraphStep& step, const GraphWords& words,
                           cuda::GraphNode* node) const {
  const cuda::Driver& driver = link_->driver();
  std::vector<cuda::GraphNode> before;
  for (int earlier : step.after) before.push_back(nodes_[earlier]);
  if (step.kernel != nullptr) {
    void* parameters[] = {Address(words)};
    return step.kernel->AddTo(graph_, before.data(), before.size(), step.grid, parameters, node);
  }
  if (step.enqueue == nullptr) {
    const cuda::MemsetNodeParameters zeros = Zeros(step, words);
    return cuda::Check(driver.cuGraphAddMemsetNode(node, graph_, before.data(), before.size(),
                                                   &zeros, link_->context()),
                       "cuGraphAddMemsetNode");
  }
  cuda::Graph child = nullptr;
  TFMEM_RETURN_IF_ERROR(Capture(step, words, &child));
  const absl::Status added = cuda::Check(
      driver.cuGraphAddChildGraphNode(node, graph_, before.data(), before.size(), child),
      "cuGraphAddChildGraphNode");  // which copies it
  cuda::ReportLostError(cuda::Check(driver.cuGraphDestroy(child), "cuGraphDestroy"));
  return added;
}

absl::Status GpuGraph::Patch(absl::Span<const GraphWords> words) {
  for (size_t i = 0; i < steps_.size(); ++i) {
    if (words[i] == words_[i]) continue;
    TFMEM_RETURN_IF_ERROR(PatchNode(steps_[i], words[i], nodes_[i]));
    words_[i] = words[i];
  }
  return absl::OkStatus();
}

absl::Status GpuGraph::PatchNode(const GraphStep& step, const GraphWords& words,
                                 cuda::GraphNode node) {
  const cuda::Driver& driver = link_->driver();
  if (step.kernel != nullptr) {
    void* parameters[] = {Address(words)};
    const cuda::KernelNodeParameters filled = step.kernel->Node(step.grid, parameters);
    return cuda::Check(driver.cuGraphExecKernelNodeSetParams_v2(exec_, node, &filled),
                       "cuGraphExecKernelNodeSetParams");
  }
  if (step.enqueue == nullptr) {
    const cuda::MemsetNodeParameters zeros = Zeros(step, words);
    return cuda::Check(driver.cuGraphExecMemsetNodeSetParams(exec_, node, &zeros, link_->context()),
                       "cuGraphExecMemsetNodeSetParams");
  }
  cuda::Graph child = nullptr;
  TFMEM_RETURN_IF_ERROR(Capture(step, words, &child));
  const absl::Status set =
      cuda::Check(driver.cuGraphExecChildGraphNodeSetParams(exec_, node, child),
                  "cuGraphExecChildGraphNodeSetParams");
  cuda::ReportLostError(cuda::Check(driver.cuGraphDestroy(child), "cuGraphDestroy"));
  return set;
}

absl::Status GpuGraph::Capture(const GraphStep& step, const GraphWords& words,
                               cuda::Graph* graph) const {
  const cuda::Driver& driver = link_->driver();
  CaptureStreams& all = ProcessWide<CaptureStreams>();
  std::lock_guard<std::mutex> lock(all.mutex);
  cuda::Stream& stream = all.streams[link_->context()];
  if (stream == nullptr) {
    TFMEM_CUDA_RETURN_IF_ERROR(driver, cuStreamCreate, &stream, cuda::kStreamNonBlocking);
  }
  TFMEM_CUDA_RETURN_IF_ERROR(driver, cuStreamBeginCapture_v2, stream, cuda::kCaptureThreadLocal);
  absl::Status status = step.enqueue(stream, words);
  const absl::Status ended =
      cuda::Check(driver.cuStreamEndCapture(stream, graph), "cuStreamEndCapture");
  if (!ended.ok()) {
    // The stream's state is unknown after a failed capture.
    cuda::ReportLostError(cuda::Check(driver.cuStreamDestroy_v2(stream), "cuStreamDestroy"));
    stream = nullptr;
    return status.ok() ? ended : status;
  }
  if (!status.ok() && *graph != nullptr) {
    cuda::ReportLostError(cuda::Check(driver.cuGraphDestroy(*graph), "cuGraphDestroy"));
  }
  return status;
}

absl::Status GpuGraph::Drop() {
  const cuda::Driver& driver = link_->driver();
  absl::Status status;
  // One that runs is freed when it has ended.
  if (exec_ != nullptr) {
    status =
        cuda::Check(driver.cuGraphExecDestroy(std::exchange(exec_, nullptr)), "cuGraphExecDestroy");
  }
  if (graph_ != nullptr) {
    status.Update(
        cuda::Check(driver.cuGraphDestroy(std::exchange(graph_, nullptr)), "cuGraphDestroy"));
  }
  nodes_.clear();
  words_.clear();
  return status;
}

}  // namespace tfmem
