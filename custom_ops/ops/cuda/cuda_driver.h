// The part of the CUDA driver API that is used here, declared by hand and found at run time, so
// that one library serves machines with and without a GPU and needs no CUDA toolkit to build.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem::cuda {

// As in cuda.h, whose ABI is frozen under the symbol names below.
using Result = int;
using Device = int;
using DevicePointer = unsigned long long;
using Context = struct ContextRecord*;
using Stream = struct StreamRecord*;
using Event = struct EventRecord*;
using Module = struct ModuleRecord*;
using Function = struct FunctionRecord*;
using Graph = struct GraphRecord*;
using GraphNode = struct GraphNodeRecord*;
using GraphExec = struct GraphExecRecord*;

inline constexpr Result kSuccess = 0;
inline constexpr Result kErrorInvalidValue = 1;
inline constexpr Result kErrorOutOfMemory = 2;
// Errors of code that is for another GPU, or for a later driver.
inline constexpr Result kErrorNoBinaryForGpu = 209;
inline constexpr Result kErrorJitCompilerNotFound = 221;
inline constexpr Result kErrorUnsupportedPtxVersion = 222;
inline constexpr Result kErrorJitCompilationDisabled = 223;
inline constexpr Result kErrorNotReady = 600;

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDefault = 0;  // keeps times
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kMemHostAllocPortable = 1;
inline constexpr unsigned kMemHostRegisterPortable = 1;
inline constexpr int kPointerAttributeIsManaged = 8;
inline constexpr Device kDeviceCpu = -1;
inline constexpr int kDeviceMultiprocessors = 16;
inline constexpr int kDeviceComputeMajor = 75;
inline constexpr int kDeviceComputeMinor = 76;
inline constexpr int kDeviceSharedMemoryOptIn = 97;
inline constexpr int kFunctionMaxDynamicSharedSize = 8;
inline constexpr int kFunctionNonPortableClusterSize = 14;
inline constexpr unsigned kLaunchCooperative = 2;
inline constexpr unsigned kLaunchClusterDimension = 4;
// Other threads may call what a capture forbids meanwhile.
inline constexpr int kCaptureThreadLocal = 1;

struct LaunchAttribute {
  unsigned id = 0;
  unsigned padding = 0;
  unsigned value[16] = {};
};

struct LaunchConfig {
  unsigned grid[3] = {1, 1, 1};
  unsigned block[3] = {1, 1, 1};
  unsigned shared_bytes = 0;
  Stream stream = nullptr;
  LaunchAttribute* attributes = nullptr;
  unsigned attribute_count = 0;
};

// CUDA_KERNEL_NODE_PARAMS_v2.
struct KernelNodeParameters {
  Function function = nullptr;
  unsigned grid[3] = {1, 1, 1};
  unsigned block[3] = {1, 1, 1};
  unsigned shared_bytes = 0;
  void** parameters = nullptr;
  void** extra = nullptr;
  void* kernel = nullptr;
  Context context = nullptr;
};

// CUDA_MEMSET_NODE_PARAMS.
struct MemsetNodeParameters {
  DevicePointer to = 0;
  size_t pitch = 0;
  unsigned value = 0;
  unsigned element_bytes = 1;
  size_t width = 0;
  size_t height = 1;
};

// X(name, arguments): `name` is both the field and the symbol; _v2 marks today's 64-bit forms.
#define TFMEM_CUDA_FUNCTIONS(X)                                                                   \
  X(cuInit, (unsigned flags))                                                                     \
  X(cuGetErrorName, (Result result, const char** text))                                           \
  X(cuGetErrorString, (Result result, const char** text))                                         \
  X(cuDeviceGet, (Device * device, int ordinal))                                                  \
  X(cuDevicePrimaryCtxRetain, (Context * context, Device device))                                 \
  X(cuDevicePrimaryCtxRelease_v2, (Device device))                                                \
  X(cuCtxPushCurrent_v2, (Context context))                                                       \
  X(cuCtxPopCurrent_v2, (Context * context))                                                      \
  X(cuCtxGetDevice, (Device * device))                                                            \
  X(cuCtxSynchronize, ())                                                                         \
  X(cuStreamGetCtx, (Stream stream, Context * context))                                           \
  X(cuStreamCreate, (Stream * stream, unsigned flags))                                            \
  X(cuStreamDestroy_v2, (Stream stream))                                                          \
  X(cuStreamWaitEvent, (Stream stream, Event event, unsigned flags))                              \
  X(cuStreamSynchronize, (Stream stream))                                                         \
  X(cuEventCreate, (Event * event, unsigned flags))                                               \
  X(cuEventDestroy_v2, (Event event))                                                             \
  X(cuEventRecord, (Event event, Stream stream))                                                  \
  X(cuEventQuery, (Event event))                                                                  \
  X(cuEventSynchronize, (Event event))                                                            \
  X(cuEventElapsedTime, (float* milliseconds, Event start, Event end))                            \
  X(cuMemHostAlloc, (void** host, size_t bytes, unsigned flags))                                  \
  X(cuMemFreeHost, (void* host))                                                                  \
  X(cuMemHostRegister_v2, (void* host, size_t bytes, unsigned flags))                             \
  X(cuMemHostUnregister, (void* host))                                                            \
  X(cuMemAlloc_v2, (DevicePointer * device, size_t bytes))                                        \
  X(cuMemFree_v2, (DevicePointer device))                                                         \
  X(cuMemGetInfo_v2, (size_t* free, size_t* total))                                               \
  X(cuMemcpyDtoHAsync_v2, (void* host, DevicePointer device, size_t bytes, Stream stream))        \
  X(cuMemcpyHtoDAsync_v2, (DevicePointer device, const void* host, size_t bytes, Stream stream))  \
  X(cuMemcpyDtoDAsync_v2, (DevicePointer to, DevicePointer from, size_t bytes, Stream stream))    \
  X(cuMemPrefetchAsync, (DevicePointer pointer, size_t bytes, Device destination, Stream stream)) \
  X(cuPointerGetAttribute, (void* value, int attribute, DevicePointer pointer))                   \
  X(cuMemsetD8Async, (DevicePointer device, unsigned char value, size_t bytes, Stream stream))    \
  X(cuDeviceGetAttribute, (int* value, int attribute, Device device))                             \
  X(cuModuleLoadData, (Module * module, const void* image))                                       \
  X(cuModuleUnload, (Module module))                                                              \
  X(cuModuleGetFunction, (Function * function, Module module, const char* name))                  \
  X(cuFuncSetAttribute, (Function function, int attribute, int value))                            \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor,                                                  \
    (int* blocks, Function function, int block_size, size_t shared_bytes))                        \
  X(cuOccupancyMaxActiveClusters, (int* clusters, Function function, const LaunchConfig* config)) \
  X(cuLaunchKernelEx,                                                                             \
    (const LaunchConfig* config, Function function, void** parameters, void** extra))             \
  X(cuStreamBeginCapture_v2, (Stream stream, int mode))                                           \
  X(cuStreamEndCapture, (Stream stream, Graph * graph))                                           \
  X(cuGraphCreate, (Graph * graph, unsigned flags))                                               \
  X(cuGraphDestroy, (Graph graph))                                                                \
  X(cuGraphAddKernelNode_v2, (GraphNode * node, Graph graph, const GraphNode* before,             \
                              size_t count, const KernelNodeParameters* parameters))              \
  X(cuGraphKernelNodeSetAttribute, (GraphNode node, int attribute, const void* value))            \
  X(cuGraphAddMemsetNode, (GraphNode * node, Graph graph, const GraphNode* before, size_t count,  \
                           const MemsetNodeParameters* parameters, Context context))              \
  X(cuGraphAddChildGraphNode,                                                                     \
    (GraphNode * node, Graph graph, const GraphNode* before, size_t count, Graph child))          \
  X(cuGraphInstantiateWithFlags, (GraphExec * exec, Graph graph, unsigned long long flags))       \
  X(cuGraphExecDestroy, (GraphExec exec))                                                         \
  X(cuGraphLaunch, (GraphExec exec, Stream stream))                                               \
  X(cuGraphExecKernelNodeSetParams_v2,                                                            \
    (GraphExec exec, GraphNode node, const KernelNodeParameters* parameters))                     \
  X(cuGraphExecMemsetNodeSetParams,                                                               \
    (GraphExec exec, GraphNode node, const MemsetNodeParameters* parameters, Context context))    \
  X(cuGraphExecChildGraphNodeSetParams, (GraphExec exec, GraphNode node, Graph child))

struct Driver {
#define TFMEM_DECLARE(name, arguments) Result(*name) arguments = nullptr;
  TFMEM_CUDA_FUNCTIONS(TFMEM_DECLARE)
#undef TFMEM_DECLARE
};

// Opens libcuda.so.1 on the first call; Unavailable with the loader's words if it cannot be.
absl::StatusOr<const Driver*> LoadDriver();

// OK, or what the driver says about `result` of `call`; ResourceExhausted when out of memory.
absl::Status Check(Result result, const char* call);

// Calls a driver function and returns its failure from the enclosing function.
#define TFMEM_CUDA_RETURN_IF_ERROR(driver, function, ...) \
  TFMEM_RETURN_IF_ERROR(::tfmem::cuda::Check((driver).function(__VA_ARGS__), #function))

// Makes a context current for a scope. Destructors and foreign threads have no current context.
class ScopedContext {
 public:
  ScopedContext(const Driver& driver, Context context)
      : driver_(driver), status_(Check(driver.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")) {}
  ~ScopedContext() {
    Context popped = nullptr;
    if (status_.ok()) driver_.cuCtxPopCurrent_v2(&popped);
  }
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;

  const absl::Status& status() const { return status_; }

 private:
  const Driver& driver_;
  const absl::Status status_;
};

// For failures in destructors, where no step is left to fail: counts and prints them.
void ReportLostError(const absl::Status& status);

}  // namespace tfmem::cuda
