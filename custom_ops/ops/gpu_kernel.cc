#include "custom_ops/ops/gpu_kernel.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tfmem {
namespace {

constexpr size_t kPortableClusters = 8;          // CTAs; larger ones have to be allowed
constexpr int64_t kPlainSharedBytes = 48 << 10;  // more has to be asked for
constexpr size_t kMostPending = 4;
constexpr size_t kStatusBytes = sizeof(int32_t);

struct Cache {
  std::mutex mutex;
  std::map<std::pair<cuda::Context, std::string>, std::shared_ptr<GpuKernel>> kernels;
};

Cache& cache() {
  static Cache* instance = new Cache;  // lives as long as the process and its driver
  return *instance;
}

absl::StatusOr<int64_t> DeviceAttribute(GpuLink* link, int attribute) {
  int value = 0;
  TFMEM_CUDA_RETURN_IF_ERROR(link->driver(), cuDeviceGetAttribute, &value, attribute,
                             link->device());
  return value;
}

}  // namespace

struct GpuKernelAccess {
  static absl::StatusOr<std::shared_ptr<GpuKernel>> Open(GpuLink* link, GpuProgram program) {
    std::shared_ptr<GpuKernel> kernel(new GpuKernel(link, std::move(program)));
    absl::Status status = kernel->Open();
    if (!status.ok()) return status;
    return kernel;
  }
};

absl::StatusOr<std::shared_ptr<GpuKernel>> GpuKernel::Load(GpuLink* link,
                                                           const std::string& bytes) {
  Cache& all = cache();
  std::lock_guard<std::mutex> lock(all.mutex);
  const std::pair<cuda::Context, std::string> key{link->context(), bytes};
  if (auto known = all.kernels.find(key); known != all.kernels.end()) return known->second;
  absl::StatusOr<GpuProgram> program = ParseGpuProgram(bytes);
  if (!program.ok()) return program.status();
  auto kernel = GpuKernelAccess::Open(link, *std::move(program));
  if (kernel.ok()) all.kernels[key] = *kernel;
  return kernel;
}

absl::Status GpuKernel::CheckDevice() const {
  absl::StatusOr<int64_t> major = DeviceAttribute(link_, cuda::kDeviceComputeMajor);
  absl::StatusOr<int64_t> minor = DeviceAttribute(link_, cuda::kDeviceComputeMinor);
  absl::StatusOr<int64_t> shared = DeviceAttribute(link_, cuda::kDeviceSharedMemoryOptIn);
  for (const auto* value : {&major, &minor, &shared}) {
    if (!value->ok()) return value->status();
  }
  const int64_t arch = *major * 10 + *minor;
  if (program_.cubin ? arch != program_.arch : arch < program_.arch) {
    return absl::FailedPreconditionError(
        absl::StrCat("it is for compute capability ", program_.arch / 10, ".", program_.arch % 10,
                     program_.cubin ? "" : " and later", ", this GPU has ", *major, ".", *minor));
  }
  if (program_.shared > *shared) {
    return absl::FailedPreconditionError(absl::StrCat("a block of it needs ", program_.shared,
                                                      " bytes of shared memory, this GPU gives ",
                                                      *shared));
  }
  return absl::OkStatus();
}

absl::Status GpuKernel::Open() {
  const cuda::Driver& driver = link_->driver();
  if (absl::Status status = CheckDevice(); !status.ok()) return status;
  cuda::ScopedContext current(driver, link_->context());
  if (!current.status().ok()) return current.status();
  TFMEM_CUDA_RETURN_IF_ERROR(driver, cuModuleLoadData, &module_, program_.image.c_str());
  TFMEM_CUDA_RETURN_IF_ERROR(driver, cuModuleGetFunction, &entry_, module_, program_.entry.c_str());
  if (!program_.fallback.empty()) {
    TFMEM_CUDA_RETURN_IF_ERROR(driver, cuModuleGetFunction, &fallback_, module_,
                               program_.fallback.c_str());
  }
  if (program_.shared > kPlainSharedBytes) {
    TFMEM_CUDA_RETURN_IF_ERROR(driver, cuFuncSetAttribute, entry_,
                               cuda::kFunctionMaxDynamicSharedSize, program_.shared);
  }
  if (program_.cluster > static_cast<int64_t>(kPortableClusters)) {
    TFMEM_CUDA_RETURN_IF_ERROR(driver, cuFuncSetAttribute, entry_,
                               cuda::kFunctionNonPortableClusterSize, 1);
  }
  absl::Status status = FindResidency();
  opened_ = status.ok();
  return status;
}

absl::Status GpuKernel::FindResidency() {
  const cuda::Driver& driver = link_->driver();
  absl::StatusOr<int64_t> processors = DeviceAttribute(link_, cuda::kDeviceMultiprocessors);
  if (!processors.ok()) return processors.status();
  processors_ = *processors;
  int resident = 0;
  if (program_.cluster > 1) {
    cuda::LaunchAttribute attributes[2];
    const cuda::LaunchConfig config = Config(1, attributes);
    TFMEM_CUDA_RETURN_IF_ERROR(driver, cuOccupancyMaxActiveClusters, &resident, entry_, &config);
    resident_ = resident * program_.cluster;
  } else {
    TFMEM_CUDA_RETURN_IF_ERROR(driver, cuOccupancyMaxActiveBlocksPerMultiprocessor, &resident,
                               entry_, program_.threads, program_.shared);
    resident_ = resident * processors_;
  }
  const int64_t needed = program_.cooperative ? program_.ctas : program_.cluster;
  if (resident_ < needed) {
    return absl::FailedPreconditionError(absl::StrCat("a group of ", needed,
                                                      " blocks does not fit: this GPU runs ",
                                                      resident_, " of them at once"));
  }
  return absl::OkStatus();
}

GpuKernel::~GpuKernel() {
  if (module_ == nullptr) return;
  const cuda::Driver& driver = link_->driver();
  cuda::ScopedContext current(driver, link_->context());
  absl::Status status = current.status();
  // The device may still run it.
  if (status.ok() && opened_) status = cuda::Check(driver.cuCtxSynchronize(), "cuCtxSynchronize");
  if (status.ok()) status = cuda::Check(driver.cuModuleUnload(module_), "cuModuleUnload");
  cuda::ReportLostError(status);  // it stays loaded
}

// `attributes` holds two.
cuda::LaunchConfig GpuKernel::Config(int64_t groups, cuda::LaunchAttribute* attributes) const {
  cuda::LaunchConfig config;
  config.grid[0] = program_.ctas;
  config.grid[1] = groups;
  config.block[0] = program_.threads;
  config.shared_bytes = program_.shared;
  config.attributes = attributes;
  if (program_.cluster > 1) {
    cuda::LaunchAttribute& attribute = attributes[config.attribute_count++];
    attribute.id = cuda::kLaunchClusterDimension;
    attribute.value[0] = program_.cluster;
    attribute.value[1] = attribute.value[2] = 1;
  }
  if (program_.cooperative) {
    cuda::LaunchAttribute& attribute = attributes[config.attribute_count++];
    attribute.id = cuda::kLaunchCooperative;
    attribute.value[0] = 1;
  }
  return config;
}

absl::Status GpuKernel::Launch(cuda::Stream stream, KernelParameter* parameter,
                               int64_t groups) const {
  cuda::ScopedContext current(link_->driver(), link_->context());
  if (!current.status().ok()) return current.status();
  const int64_t at_once = program_.cooperative ? resident_ / program_.ctas : groups;
  const std::vector<GroupRange> launches = CutLaunches(groups, at_once);
  for (const Turn& turn : Turns(parameter->time(), program_.stages)) {
    parameter->SetTurn(turn);
    for (const GroupRange& launch : launches) {
      parameter->SetGroups(launch.first, groups);
      cuda::LaunchAttribute attributes[2];
      cuda::LaunchConfig config = Config(launch.count, attributes);
      config.stream = stream;
      void* parameters[] = {parameter->words.data()};
      TFMEM_CUDA_RETURN_IF_ERROR(link_->driver(), cuLaunchKernelEx, &config, entry_, parameters,
                                 nullptr);
    }
  }
  return absl::OkStatus();
}

absl::Status GpuKernel::LaunchFallback(cuda::Stream stream, KernelParameter* parameter,
                                       int64_t groups) const {
  cuda::ScopedContext current(link_->driver(), link_->context());
  if (!current.status().ok()) return current.status();
  for (const GroupRange& launch : CutLaunches(groups, groups)) {
    parameter->SetGroups(launch.first, groups);
    cuda::LaunchConfig config;
    config.grid[1] = launch.count;
    config.block[0] = program_.threads;
    config.stream = stream;
    void* parameters[] = {parameter->words.data()};
    TFMEM_CUDA_RETURN_IF_ERROR(link_->driver(), cuLaunchKernelEx, &config, fallback_, parameters,
                               nullptr);
  }
  return absl::OkStatus();
}

absl::Status GpuKernel::LaunchBlocks(cuda::Stream stream, void* parameter, int64_t blocks) const {
  cuda::ScopedContext current(link_->driver(), link_->context());
  if (!current.status().ok()) return current.status();
  cuda::LaunchConfig config;
  config.grid[0] = blocks;
  config.block[0] = program_.threads;
  config.shared_bytes = program_.shared;
  config.stream = stream;
  void* parameters[] = {parameter};
  TFMEM_CUDA_RETURN_IF_ERROR(link_->driver(), cuLaunchKernelEx, &config, entry_, parameters,
                             nullptr);
  return absl::OkStatus();
}

const absl::StatusOr<std::shared_ptr<GpuKernel>> GpuKernels::Get(GpuLink* link, size_t index) {
  Entry& entry = loaded_[index];
  if (!entry.status.ok()) return entry.status;
  if (entry.kernel == nullptr) {
    absl::StatusOr<std::shared_ptr<GpuKernel>> kernel = GpuKernel::Load(link, programs_[index]);
    // Memory may be there the next time; what else is wrong stays so.
    if (!kernel.ok() && !absl::IsResourceExhausted(kernel.status())) entry.status = kernel.status();
    if (!kernel.ok()) return kernel.status();
    entry.kernel = *kernel;
  }
  return entry.kernel;
}

absl::StatusOr<std::shared_ptr<GpuKernel>> GpuKernels::Choose(GpuLink* link, int64_t batch) {
  std::lock_guard<std::mutex> lock(mutex_);
  loaded_.resize(programs_.size());
  std::shared_ptr<GpuKernel> last;
  std::string reasons;
  bool lacks_memory = false;
  for (size_t i = 0; i < programs_.size(); ++i) {
    absl::StatusOr<std::shared_ptr<GpuKernel>> kernel = Get(link, i);
    if (!kernel.ok()) {
      absl::StrAppend(&reasons, reasons.empty() ? "" : "; ", "program ", i, ": ",
                      kernel.status().message());
      lacks_memory |= absl::IsResourceExhausted(kernel.status());
      continue;
    }
    last = *kernel;
    if (last->program().max_batch >= batch) return last;
  }
  if (last != nullptr) return last;
  return lacks_memory ? absl::ResourceExhaustedError(reasons)
                      : absl::FailedPreconditionError(reasons);
}

std::shared_ptr<GpuKernel> GpuKernels::WithoutWaiting(GpuLink* link) {
  std::lock_guard<std::mutex> lock(mutex_);
  loaded_.resize(programs_.size());
  absl::StatusOr<std::shared_ptr<GpuKernel>> first = Get(link, 0);
  return first.ok() && (*first)->program().stages > 0 ? *first : nullptr;
}

absl::Status StatusWatch::Read(GpuLink* link, cuda::Stream stream, const void* status) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failed_ || pending_.size() >= kMostPending) return absl::OkStatus();
  absl::StatusOr<PinnedBlock> block = PinnedBlock::Acquire(link, kStatusBytes, 0, "kernel status");
  if (!block.ok()) return block.status();
  cuda::ScopedContext current(link->driver(), link->context());
  if (!current.status().ok()) return current.status();
  if (block->last_use()) {
    absl::Status waits = block->last_use().MakeWait(stream);
    if (!waits.ok()) return waits;
  }
  absl::StatusOr<PooledEvent> copied = link->NewEvent();
  if (!copied.ok()) return copied.status();
  absl::Status done = cuda::Check(
      link->driver().cuMemcpyDtoHAsync_v2(
          block->data(), reinterpret_cast<cuda::DevicePointer>(status), kStatusBytes, stream),
      "cuMemcpyDtoHAsync");
  if (done.ok()) done = copied->Record(stream);
  if (!done.ok()) {
    if (!link->Drain(stream)) block->Abandon();
    return done;
  }
  block->set_last_use(*std::move(copied));
  pending_.push_back(*std::move(block));
  return absl::OkStatus();
}

absl::StatusOr<bool> StatusWatch::Failed() {
  std::lock_guard<std::mutex> lock(mutex_);
  while (!pending_.empty() && !failed_) {
    absl::StatusOr<bool> passed = pending_.front().last_use().Passed();
    if (!passed.ok()) return passed;
    if (!*passed) break;
    failed_ = *static_cast<const int32_t*>(pending_.front().data()) == kStatusWaited;
    pending_.pop_front();
  }
  return failed_;
}

void TrimGpuKernels() {
  Cache& all = cache();
  std::lock_guard<std::mutex> lock(all.mutex);
  for (auto entry = all.kernels.begin(); entry != all.kernels.end();) {
    entry = entry->second.use_count() == 1 ? all.kernels.erase(entry) : std::next(entry);
  }
}

}  // namespace tfmem
