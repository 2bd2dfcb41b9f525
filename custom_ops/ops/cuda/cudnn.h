// The part of cuDNN that is used here, declared by hand and found at run time: TensorFlow's GPU
// packages bring the library.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "custom_ops/ops/cuda/cuda_driver.h"

namespace tfmem::cudnn {

// As in cudnn_graph.h, cudnn_ops.h and cudnn_cnn.h of cuDNN 9.
using Result = int;
using Handle = struct HandleRecord*;
using Tensor = struct TensorRecord*;          // cudnnTensorDescriptor_t
using Pooling = struct PoolingRecord*;        // cudnnPoolingDescriptor_t
using Descriptor = struct DescriptorRecord*;  // cudnnBackendDescriptor_t

inline constexpr Result kSuccess = 0;
inline constexpr Result kNotInitialized = 1001;
inline constexpr Result kHostAllocationFailed = 4003;
inline constexpr Result kDeviceAllocationFailed = 4004;

enum Type : int { kFloat = 0, kDouble = 1, kHalf = 2, kBfloat16 = 9 };
enum PoolingMode : int { kAverageOfImage = 2, kDeterministicMax = 3 };  // without what is padded
enum NanPropagation : int { kSkipNan = 0, kPropagateNan = 1 };

// Descriptors of the graph API, names of their attributes, and types of these.
enum Kind : int {
  kConvolution = 1,
  kEngine = 2,
  kEngineConfig = 3,
  kHeuristics = 4,
  kExecutionPlan = 5,
  kForwardConvolution = 10,
  kFilterGradient = 11,
  kInputGradient = 12,
  kOperationGraph = 15,
  kVariantPack = 16,
  kTensor = 17,
};
enum Attribute : int {
  kConvolutionCompute = 100,
  kConvolutionMode = 101,
  kConvolutionDilations = 102,
  kConvolutionStrides = 103,
  kConvolutionPostPaddings = 104,
  kConvolutionPrePaddings = 105,
  kConvolutionDimensions = 106,
  kHeuristicsMode = 200,
  kHeuristicsGraph = 201,
  kHeuristicsResults = 202,
  kConfigEngine = 300,
  kPlanHandle = 400,
  kPlanConfig = 401,
  kPlanWorkspace = 402,
  kForwardAlpha = 700,        // then beta, the convolution, w, x, y
  kInputGradientAlpha = 706,  // then beta, the convolution, w, the gradients of x and y
  kFilterGradientAlpha =
      712,  // then beta, the convolution, the gradient of w, x, the gradient of y
  kGraphHandle = 800,
  kGraphOperations = 801,
  kTensorAlignment = 900,
  kTensorType = 901,
  kTensorSizes = 902,
  kTensorStrides = 903,
  kTensorNumber = 906,
  kPackNumbers = 1000,
  kPackPointers = 1001,
  kPackWorkspace = 1003,
  kEngineNumber = 1301,
  kEngineNotes = 1303,
};
enum AttributeType : int {
  kHandleType = 0,
  kDataType = 1,
  kInt64Type = 3,
  kFloatType = 4,
  kDoubleType = 5,
  kPointerType = 6,
  kModeType = 7,
  kHeuristicsModeType = 8,
  kNoteType = 11,
  kDescriptorType = 15,
};
enum Mode : int { kCrossCorrelation = 1 };
enum HeuristicsMode : int { kFallback = 2, kMostAccurate = 3 };
// What an engine does to numbers.
enum Note : int { kTensorCores = 0, kRoundsInputs = 1, kRoundsSums = 2, kNondeterministic = 4 };

// X(name, arguments): `name` is both the field and the symbol.
#define TFMEM_CUDNN_FUNCTIONS(X)                                                                  \
  X(cudnnCreate, (Handle * handle))                                                               \
  X(cudnnSetStream, (Handle handle, cuda::Stream stream))                                         \
  X(cudnnCreateTensorDescriptor, (Tensor * tensor))                                               \
  X(cudnnDestroyTensorDescriptor, (Tensor tensor))                                                \
  X(cudnnSetTensor4dDescriptorEx, (Tensor tensor, int type, int n, int c, int h, int w,           \
                                   int n_stride, int c_stride, int h_stride, int w_stride))       \
  X(cudnnBackendCreateDescriptor, (int kind, Descriptor* descriptor))                             \
  X(cudnnBackendDestroyDescriptor, (Descriptor descriptor))                                       \
  X(cudnnBackendFinalize, (Descriptor descriptor))                                                \
  X(cudnnBackendSetAttribute,                                                                     \
    (Descriptor descriptor, int attribute, int type, int64_t count, const void* values))          \
  X(cudnnBackendGetAttribute,                                                                     \
    (Descriptor descriptor, int attribute, int type, int64_t most, int64_t* count, void* values)) \
  X(cudnnBackendExecute, (Handle handle, Descriptor plan, Descriptor pack))                       \
  X(cudnnCreatePoolingDescriptor, (Pooling * pooling))                                            \
  X(cudnnDestroyPoolingDescriptor, (Pooling pooling))                                             \
  X(cudnnSetPooling2dDescriptor, (Pooling pooling, int mode, int nan, int window_h, int window_w, \
                                  int pad_h, int pad_w, int stride_h, int stride_w))              \
  X(cudnnPoolingForward, (Handle handle, Pooling pooling, const void* alpha, Tensor x,            \
                          const void* x_at, const void* beta, Tensor y, void* y_at))              \
  X(cudnnPoolingBackward,                                                                         \
    (Handle handle, Pooling pooling, const void* alpha, Tensor y, const void* y_at, Tensor dy,    \
     const void* dy_at, Tensor x, const void* x_at, const void* beta, Tensor dx, void* dx_at))    \
  X(cudnnTransformTensor, (Handle handle, const void* alpha, Tensor from, const void* from_at,    \
                           const void* beta, Tensor to, void* to_at))

struct Library {
#define TFMEM_DECLARE(name, arguments) Result(*name) arguments = nullptr;
  TFMEM_CUDNN_FUNCTIONS(TFMEM_DECLARE)
#undef TFMEM_DECLARE
};

// Opens cuDNN, the one that the process has if it has one, else TensorFlow's, else the system's.
// Unavailable with the loader's words if there is none.
absl::StatusOr<const Library*> Load();

// OK, or what went wrong in `call`; ResourceExhausted when out of memory.
absl::Status Check(Result result, const char* call);

#define TFMEM_CUDNN_RETURN_IF_ERROR(library, function, ...) \
  TFMEM_RETURN_IF_ERROR(::tfmem::cudnn::Check((library).function(__VA_ARGS__), #function))

}  // namespace tfmem::cudnn
