#include "custom_ops/ops/cuda/gpu_graph.h"

#include <limits>
#include <map>

#include "custom_ops/ops/process_wide.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

// Versions that are kept, and calls that are rather captured again than kept in another version.
constexpr size_t kMostVersions = 4;
constexpr int kMostCapturedAgain = 8;

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
  absl::Status status = current.status();
  for (Version& version : versions_) {
    if (current.status().ok()) status.Update(Drop(&version));
  }
  cuda::ReportLostError(status);
}

absl::Status GpuGraph::Launch(cuda::Stream stream, absl::Span<const GraphWords> words) {
  const cuda::Driver& driver = link_->driver();
  const cuda::ScopedContext current(driver, link_->context());
  if (!current.status().ok()) return current.status();
  std::lock_guard<std::mutex> lock(mutex_);
  TFMEM_ASSIGN_OR_RETURN(Version * version, VersionFor(words));
  const absl::Status status =
      cuda::Check(driver.cuGraphLaunch(version->exec, stream), "cuGraphLaunch");
  if (status.ok()) return status;
  for (Version& each : versions_) cuda::ReportLostError(Drop(&each));
  versions_.clear();
  return status;
}

// The version with these words: the nearest one, or a new one.
absl::StatusOr<GpuGraph::Version*> GpuGraph::VersionFor(absl::Span<const GraphWords> words) {
  auto nearest = versions_.end();
  int least = std::numeric_limits<int>::max();
  for (auto version = versions_.begin(); version != versions_.end() && least > 0; ++version) {
    const int calls = CallsToCapture(*version, words);
    if (calls >= least) continue;
    nearest = version;
    least = calls;
  }
  if (nearest == versions_.end()) {
    TFMEM_RETURN_IF_ERROR(Make(words));
    return &versions_.back();
  }
  // Without memory for another version, the nearest one is changed.
  if (least > kMostCapturedAgain && versions_.size() < kMostVersions && Make(words).ok()) {
    return &versions_.back();
  }
  if (Patch(words, &*nearest).ok()) return &*nearest;
  const absl::Status dropped = Drop(&*nearest);  // another shape of a library's call
  versions_.erase(nearest);
  TFMEM_RETURN_IF_ERROR(dropped);
  TFMEM_RETURN_IF_ERROR(Make(words));
  return &versions_.back();
}

int GpuGraph::CallsToCapture(const Version& version, absl::Span<const GraphWords> words) const {
  int calls = 0;
  for (size_t i = 0; i < steps_.size(); ++i) {
    calls += steps_[i].enqueue != nullptr && words[i] != version.words[i];
  }
  return calls;
}

absl::Status GpuGraph::Make(absl::Span<const GraphWords> words) {
  Version& made = versions_.emplace_back();
  const absl::Status status = Fill(words, &made);
  if (status.ok()) return status;
  cuda::ReportLostError(Drop(&made));
  versions_.pop_back();
  return status;
}

absl::Status GpuGraph::Fill(absl::Span<const GraphWords> words, Version* made) const {
  const cuda::Driver& driver = link_->driver();
  TFMEM_CUDA_RETURN_IF_ERROR(driver, cuGraphCreate, &made->graph, 0);
  for (size_t i = 0; i < steps_.size(); ++i) {
    TFMEM_RETURN_IF_ERROR(Add(steps_[i], words[i], made));
  }
  TFMEM_CUDA_RETURN_IF_ERROR(driver, cuGraphInstantiateWithFlags, &made->exec, made->graph, 0);
  made->words.assign(words.begin(), words.end());
  return absl::OkStatus();
}

absl::Status GpuGraph::Add(const GraphStep& step, const GraphWords& words, Version* version) const {
  const cuda::Driver& driver = link_->driver();
  std::vector<cuda::GraphNode> before;
  for (int earlier : step.after) before.push_back(version->nodes[earlier]);
  cuda::GraphNode* const node = &version->nodes.emplace_back();
  if (step.kernel != nullptr) {
    void* parameters[] = {Address(words)};
    return step.kernel->AddTo(version->graph, before.data(), before.size(), step.grid, parameters,
                              node);
  }
  if (step.enqueue == nullptr) {
    const cuda::MemsetNodeParameters zeros = Zeros(step, words);
    return cuda::Check(driver.cuGraphAddMemsetNode(node, version->graph, before.data(),
                                                   before.size(), &zeros, link_->context()),
                       "cuGraphAddMemsetNode");
  }
  cuda::Graph child = nullptr;
  TFMEM_RETURN_IF_ERROR(Capture(step, words, &child));
  const absl::Status added = cuda::Check(
      driver.cuGraphAddChildGraphNode(node, version->graph, before.data(), before.size(), child),
      "cuGraphAddChildGraphNode");  // which copies it
  cuda::ReportLostError(cuda::Check(driver.cuGraphDestroy(child), "cuGraphDestroy"));
  return added;
}

absl::Status GpuGraph::Patch(absl::Span<const GraphWords> words, Version* version) const {
  for (size_t i = 0; i < steps_.size(); ++i) {
    if (words[i] == version->words[i]) continue;
    TFMEM_RETURN_IF_ERROR(PatchNode(steps_[i], words[i], version->exec, version->nodes[i]));
    version->words[i] = words[i];
  }
  return absl::OkStatus();
}

absl::Status GpuGraph::PatchNode(const GraphStep& step, const GraphWords& words,
                                 cuda::GraphExec exec, cuda::GraphNode node) const {
  const cuda::Driver& driver = link_->driver();
  if (step.kernel != nullptr) {
    void* parameters[] = {Address(words)};
    const cuda::KernelNodeParameters filled = step.kernel->Node(step.grid, parameters);
    return cuda::Check(driver.cuGraphExecKernelNodeSetParams_v2(exec, node, &filled),
                       "cuGraphExecKernelNodeSetParams");
  }
  if (step.enqueue == nullptr) {
    const cuda::MemsetNodeParameters zeros = Zeros(step, words);
    return cuda::Check(driver.cuGraphExecMemsetNodeSetParams(exec, node, &zeros, link_->context()),
                       "cuGraphExecMemsetNodeSetParams");
  }
  cuda::Graph child = nullptr;
  TFMEM_RETURN_IF_ERROR(Capture(step, words, &child));
  const absl::Status set = cuda::Check(driver.cuGraphExecChildGraphNodeSetParams(exec, node, child),
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

absl::Status GpuGraph::Drop(Version* version) const {
  const cuda::Driver& driver = link_->driver();
  absl::Status status;
  // One that runs is freed when it has ended.
  if (version->exec != nullptr) {
    status = cuda::Check(driver.cuGraphExecDestroy(std::exchange(version->exec, nullptr)),
                         "cuGraphExecDestroy");
  }
  if (version->graph != nullptr) {
    status.Update(cuda::Check(driver.cuGraphDestroy(std::exchange(version->graph, nullptr)),
                              "cuGraphDestroy"));
  }
  return status;
}

}  // namespace tfmem
