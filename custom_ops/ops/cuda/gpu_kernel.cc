#include "custom_ops/ops/cuda/gpu_kernel.h"

#include <map>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/process_wide.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

constexpr int64_t kPortableClusters = 8;         // CTAs; larger ones have to be allowed
constexpr int64_t kPlainSharedBytes = 48 << 10;  // more has to be asked for

struct Modules {
  std::mutex mutex;
  std::map<std::pair<cuda::Context, std::string>, std::shared_ptr<GpuModule>> loaded;  // by digest
};

absl::StatusOr<int64_t> DeviceAttribute(GpuLink* link, int attribute) {
  int value = 0;
  TFMEM_CUDA_RETURN_IF_ERROR(link->driver(), cuDeviceGetAttribute, &value, attribute,
                             link->device());
  return value;
}

std::string Dotted(int64_t arch) { return absl::StrCat(arch / 10, ".", arch % 10); }

// Whether a module could not be loaded because the driver runs no such code.
bool IsForOthers(cuda::Result result) {
  return result == cuda::kErrorNoBinaryForGpu || result == cuda::kErrorJitCompilerNotFound ||
         result == cuda::kErrorUnsupportedPtxVersion ||
         result == cuda::kErrorJitCompilationDisabled;
}

}  // namespace

absl::StatusOr<int64_t> ComputeCapability(GpuLink* link) {
  TFMEM_ASSIGN_OR_RETURN(int64_t major, DeviceAttribute(link, cuda::kDeviceComputeMajor));
  TFMEM_ASSIGN_OR_RETURN(int64_t minor, DeviceAttribute(link, cuda::kDeviceComputeMinor));
  return major * 10 + minor;
}

absl::Status NoProgram(GpuLink* link) {
  TFMEM_ASSIGN_OR_RETURN(const int64_t arch, ComputeCapability(link));
  return absl::FailedPreconditionError(
      absl::StrCat("it has none for any GPU, this GPU has compute capability ", Dotted(arch)));
}

absl::StatusOr<std::shared_ptr<GpuModule>> GpuModule::Load(GpuLink* link,
                                                           const KernelImage& image) {
  Modules& all = ProcessWide<Modules>();
  std::lock_guard<std::mutex> lock(all.mutex);
  const std::pair<cuda::Context, std::string> key{link->context(), image.digest};
  if (auto known = all.loaded.find(key); known != all.loaded.end()) return known->second;
  std::shared_ptr<GpuModule> made(new GpuModule(link));
  const cuda::Result result = link->driver().cuModuleLoadData(&made->module_, image.code->c_str());
  const absl::Status status = cuda::Check(result, "cuModuleLoadData");
  if (IsForOthers(result)) return absl::FailedPreconditionError(status.message());
  if (!status.ok()) return status;
  all.loaded[key] = made;
  return made;
}

GpuModule::~GpuModule() {
  if (module_ == nullptr) return;
  const cuda::Driver& driver = link_->driver();
  cuda::ScopedContext current(driver, link_->context());
  absl::Status status = current.status();
  // The device may still run it.
  if (status.ok() && launched_) status = cuda::Check(driver.cuCtxSynchronize(), "cuCtxSynchronize");
  if (status.ok()) status = cuda::Check(driver.cuModuleUnload(module_), "cuModuleUnload");
  cuda::ReportLostError(status);  // it stays loaded
}

absl::StatusOr<std::unique_ptr<GpuKernel>> GpuKernel::Load(GpuLink* link,
                                                           const KernelImage& image) {
  std::unique_ptr<GpuKernel> kernel(new GpuKernel(link, image));
  TFMEM_RETURN_IF_ERROR(kernel->Open());
  return kernel;
}

absl::Status GpuKernel::CheckDevice() const {
  TFMEM_ASSIGN_OR_RETURN(const int64_t arch, ComputeCapability(link_));
  TFMEM_ASSIGN_OR_RETURN(int64_t shared, DeviceAttribute(link_, cuda::kDeviceSharedMemoryOptIn));
  if (image_.cubin ? arch != image_.arch : arch < image_.arch) {
    return absl::FailedPreconditionError(
        absl::StrCat("it is for compute capability ", Dotted(image_.arch),
                     image_.cubin ? "" : " and later", ", this GPU has ", Dotted(arch)));
  }
  if (image_.shared > shared) {
    return absl::FailedPreconditionError(absl::StrCat(
        "a CTA of it needs ", image_.shared, " bytes of shared memory, this GPU gives ", shared));
  }
  return absl::OkStatus();
}

absl::Status GpuKernel::Open() {
  const cuda::Driver& driver = link_->driver();
  TFMEM_RETURN_IF_ERROR(CheckDevice());
  cuda::ScopedContext current(driver, link_->context());
  if (!current.status().ok()) return current.status();
  TFMEM_ASSIGN_OR_RETURN(module_, GpuModule::Load(link_, image_));
  TFMEM_CUDA_RETURN_IF_ERROR(driver, cuModuleGetFunction, &entry_, module_->module_,
                             image_.entry.c_str());
  if (image_.shared > kPlainSharedBytes) {
    TFMEM_CUDA_RETURN_IF_ERROR(driver, cuFuncSetAttribute, entry_,
                               cuda::kFunctionMaxDynamicSharedSize, image_.shared);
  }
  if (image_.cluster > kPortableClusters) {
    TFMEM_CUDA_RETURN_IF_ERROR(driver, cuFuncSetAttribute, entry_,
                               cuda::kFunctionNonPortableClusterSize, 1);
  }
  return FindResidency();
}

absl::Status GpuKernel::FindResidency() {
  const cuda::Driver& driver = link_->driver();
  TFMEM_ASSIGN_OR_RETURN(processors_, DeviceAttribute(link_, cuda::kDeviceMultiprocessors));
  int resident = 0;
  if (image_.cluster > 1) {
    cuda::LaunchAttribute attributes[2];
    const cuda::LaunchConfig config = Config({image_.cluster, 1}, attributes);
    TFMEM_CUDA_RETURN_IF_ERROR(driver, cuOccupancyMaxActiveClusters, &resident, entry_, &config);
    resident_ = resident * image_.cluster;
  } else {
    TFMEM_CUDA_RETURN_IF_ERROR(driver, cuOccupancyMaxActiveBlocksPerMultiprocessor, &resident,
                               entry_, image_.threads, image_.shared);
    resident_ = resident * processors_;
  }
  if (resident_ < image_.cluster) {
    return absl::FailedPreconditionError(absl::StrCat("a cluster of ", image_.cluster,
                                                      " CTAs does not fit: this GPU runs ",
                                                      resident_, " of them at once"));
  }
  return absl::OkStatus();
}

// `attributes` holds two.
cuda::LaunchConfig GpuKernel::Config(Grid grid, cuda::LaunchAttribute* attributes) const {
  cuda::LaunchConfig config;
  config.grid[0] = grid.x;
  config.grid[1] = grid.y;
  config.block[0] = image_.threads;
  config.shared_bytes = image_.shared;
  config.attributes = attributes;
  if (image_.cluster > 1) {
    cuda::LaunchAttribute& attribute = attributes[config.attribute_count++];
    attribute.id = cuda::kLaunchClusterDimension;
    attribute.value[0] = image_.cluster;
    attribute.value[1] = attribute.value[2] = 1;
  }
  if (image_.cooperative) {
    cuda::LaunchAttribute& attribute = attributes[config.attribute_count++];
    attribute.id = cuda::kLaunchCooperative;
    attribute.value[0] = 1;
  }
  return config;
}

absl::Status GpuKernel::Launch(cuda::Stream stream, Grid grid, const void* parameter) const {
  cuda::ScopedContext current(link_->driver(), link_->context());
  if (!current.status().ok()) return current.status();
  cuda::LaunchAttribute attributes[2];
  cuda::LaunchConfig config = Config(grid, attributes);
  config.stream = stream;
  void* parameters[] = {const_cast<void*>(parameter)};  // which the driver copies
  module_->launched_ = true;
  TFMEM_CUDA_RETURN_IF_ERROR(link_->driver(), cuLaunchKernelEx, &config, entry_, parameters,
                             nullptr);
  return absl::OkStatus();
}

cuda::KernelNodeParameters GpuKernel::Node(Grid grid, void** parameters) const {
  cuda::KernelNodeParameters node;
  node.function = entry_;
  node.grid[0] = grid.x;
  node.grid[1] = grid.y;
  node.block[0] = image_.threads;
  node.shared_bytes = image_.shared;
  node.parameters = parameters;
  return node;
}

absl::Status GpuKernel::AddTo(cuda::Graph graph, const cuda::GraphNode* before, size_t count,
                              Grid grid, void** parameters, cuda::GraphNode* node) const {
  const cuda::Driver& driver = link_->driver();
  const cuda::KernelNodeParameters filled = Node(grid, parameters);
  TFMEM_CUDA_RETURN_IF_ERROR(driver, cuGraphAddKernelNode_v2, node, graph, before, count, &filled);
  cuda::LaunchAttribute attributes[2];
  const cuda::LaunchConfig config = Config(grid, attributes);
  for (unsigned i = 0; i < config.attribute_count; ++i) {
    TFMEM_CUDA_RETURN_IF_ERROR(driver, cuGraphKernelNodeSetAttribute, *node, attributes[i].id,
                               attributes[i].value);
  }
  module_->launched_ = true;
  return absl::OkStatus();
}

void TrimGpuKernels() {
  Modules& all = ProcessWide<Modules>();
  std::lock_guard<std::mutex> lock(all.mutex);
  for (auto entry = all.loaded.begin(); entry != all.loaded.end();) {
    entry = entry->second.use_count() == 1 ? all.loaded.erase(entry) : std::next(entry);
  }
}

}  // namespace tfmem
