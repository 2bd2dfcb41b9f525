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
using Tensor = struct TensorRecord*;            // cudnnTensorDescriptor_t
using Filter = struct FilterRecord*;            // cudnnFilterDescriptor_t
using Convolution = struct ConvolutionRecord*;  // cudnnConvolutionDescriptor_t
using Pooling = struct PoolingRecord*;          // cudnnPoolingDescriptor_t

inline constexpr Result kSuccess = 0;
inline constexpr Result kNotInitialized = 1001;
inline constexpr Result kHostAllocationFailed = 4003;
inline constexpr Result kDeviceAllocationFailed = 4004;

enum Type : int { kFloat = 0, kDouble = 1, kHalf = 2, kBfloat16 = 9 };
enum Format : int { kChannelsFirst = 0, kChannelsLast = 1 };
enum Mode : int { kCrossCorrelation = 1 };
// `kDefaultMath` rounds factors of float32 to TensorFloat-32, `kFmaMath` does not.
enum Math : int { kDefaultMath = 0, kTensorOpMath = 1, kFmaMath = 3 };
enum Determinism : int { kDeterministic = 1 };
enum PoolingMode : int { kAverageOfImage = 2, kDeterministicMax = 3 };  // without what is padded
enum NanPropagation : int { kSkipNan = 0, kPropagateNan = 1 };

// An algorithm and what it takes, as cudnnConvolution*AlgoPerf_t has it.
struct Algorithm {
  int number;
  Result status;
  float milliseconds;
  size_t workspace_bytes;
  int determinism;
  int math;
  int reserved[3];
};

// X(name, arguments): `name` is both the field and the symbol.
#define TFMEM_CUDNN_FUNCTIONS(X)                                                                   \
  X(cudnnCreate, (Handle * handle))                                                                \
  X(cudnnSetStream, (Handle handle, cuda::Stream stream))                                          \
  X(cudnnCreateTensorDescriptor, (Tensor * tensor))                                                \
  X(cudnnDestroyTensorDescriptor, (Tensor tensor))                                                 \
  X(cudnnSetTensor4dDescriptorEx, (Tensor tensor, int type, int n, int c, int h, int w,            \
                                   int n_stride, int c_stride, int h_stride, int w_stride))        \
  X(cudnnCreateFilterDescriptor, (Filter * filter))                                                \
  X(cudnnDestroyFilterDescriptor, (Filter filter))                                                 \
  X(cudnnSetFilter4dDescriptor, (Filter filter, int type, int format, int k, int c, int h, int w)) \
  X(cudnnCreateConvolutionDescriptor, (Convolution * convolution))                                 \
  X(cudnnDestroyConvolutionDescriptor, (Convolution convolution))                                  \
  X(cudnnSetConvolution2dDescriptor,                                                               \
    (Convolution convolution, int pad_h, int pad_w, int stride_h, int stride_w, int dilation_h,    \
     int dilation_w, int mode, int compute))                                                       \
  X(cudnnSetConvolutionGroupCount, (Convolution convolution, int groups))                          \
  X(cudnnSetConvolutionMathType, (Convolution convolution, int math))                              \
  X(cudnnGetConvolutionForwardAlgorithm_v7,                                                        \
    (Handle handle, Tensor x, Filter w, Convolution convolution, Tensor y, int most, int* count,   \
     Algorithm* found))                                                                            \
  X(cudnnGetConvolutionBackwardDataAlgorithm_v7,                                                   \
    (Handle handle, Filter w, Tensor y, Convolution convolution, Tensor x, int most, int* count,   \
     Algorithm* found))                                                                            \
  X(cudnnGetConvolutionBackwardFilterAlgorithm_v7,                                                 \
    (Handle handle, Tensor x, Tensor y, Convolution convolution, Filter w, int most, int* count,   \
     Algorithm* found))                                                                            \
  X(cudnnGetConvolutionForwardWorkspaceSize,                                                       \
    (Handle handle, Tensor x, Filter w, Convolution convolution, Tensor y, int algorithm,          \
     size_t* bytes))                                                                               \
  X(cudnnGetConvolutionBackwardDataWorkspaceSize,                                                  \
    (Handle handle, Filter w, Tensor y, Convolution convolution, Tensor x, int algorithm,          \
     size_t* bytes))                                                                               \
  X(cudnnGetConvolutionBackwardFilterWorkspaceSize,                                                \
    (Handle handle, Tensor x, Tensor y, Convolution convolution, Filter w, int algorithm,          \
     size_t* bytes))                                                                               \
  X(cudnnConvolutionForward,                                                                       \
    (Handle handle, const void* alpha, Tensor x, const void* x_at, Filter w, const void* w_at,     \
     Convolution convolution, int algorithm, void* workspace, size_t bytes, const void* beta,      \
     Tensor y, void* y_at))                                                                        \
  X(cudnnConvolutionBackwardData,                                                                  \
    (Handle handle, const void* alpha, Filter w, const void* w_at, Tensor y, const void* y_at,     \
     Convolution convolution, int algorithm, void* workspace, size_t bytes, const void* beta,      \
     Tensor x, void* x_at))                                                                        \
  X(cudnnConvolutionBackwardFilter,                                                                \
    (Handle handle, const void* alpha, Tensor x, const void* x_at, Tensor y, const void* y_at,     \
     Convolution convolution, int algorithm, void* workspace, size_t bytes, const void* beta,      \
     Filter w, void* w_at))                                                                        \
  X(cudnnCreatePoolingDescriptor, (Pooling * pooling))                                             \
  X(cudnnDestroyPoolingDescriptor, (Pooling pooling))                                              \
  X(cudnnSetPooling2dDescriptor, (Pooling pooling, int mode, int nan, int window_h, int window_w,  \
                                  int pad_h, int pad_w, int stride_h, int stride_w))               \
  X(cudnnPoolingForward, (Handle handle, Pooling pooling, const void* alpha, Tensor x,             \
                          const void* x_at, const void* beta, Tensor y, void* y_at))               \
  X(cudnnPoolingBackward,                                                                          \
    (Handle handle, Pooling pooling, const void* alpha, Tensor y, const void* y_at, Tensor dy,     \
     const void* dy_at, Tensor x, const void* x_at, const void* beta, Tensor dx, void* dx_at))     \
  X(cudnnTransformTensor, (Handle handle, const void* alpha, Tensor from, const void* from_at,     \
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
