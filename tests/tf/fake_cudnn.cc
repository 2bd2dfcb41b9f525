// cuDNN without a GPU: plain loops, enqueued on streams of the fake driver. Its algorithms compute
// the same; one takes more memory than is sensible, one depends on the order of its sums, and one
// is refused when it is to run. It is as strict as cuDNN about layouts and sizes. What it does
// first it does with memory that it allocates, so that no capture may be the first to call it.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <set>
#include <vector>

#include "fake_cuda.h"
#include "fake_images.h"
#include "fake_pooling.h"

namespace {

constexpr size_t kWorkspace = 1000;
constexpr int kAlgorithms = 5;
// In the order in which it gives them: what they take, and whether they are deterministic.
constexpr size_t kMemory[kAlgorithms] = {size_t{1} << 40, kWorkspace, kWorkspace, 0, kWorkspace};
constexpr bool kInOrder[kAlgorithms] = {true, false, true, true, true};
constexpr int kRefused = 2;

struct Filter {
  int type = -1;
  int format = 0;
  int sizes[4] = {};  // k, c, h, w
};
struct Convolution {
  int pad[2], stride[2], dilation[2];
  int mode = -1, compute = -1, groups = 1, math = 0;
};
struct Algorithm {
  int number;
  int status;
  float milliseconds;
  size_t workspace_bytes;
  int determinism;
  int math;
  int reserved[3];
};
struct Handle {
  void* stream = nullptr;
  std::vector<double> memory;  // what a convolution's first kernel leaves for its second one
};
struct Asked {
  int type = 0, math = 0, format = 0;
};

std::atomic<int> live{0};
int runs[kAlgorithms] = {};
float milliseconds[kAlgorithms] = {};
Asked asked;

Tensor Filters(const Filter& filter) {
  const int *s = filter.sizes, c = s[1], h = s[2], w = s[3];
  Tensor made;
  made.type = filter.type;
  std::memcpy(made.sizes, s, sizeof made.sizes);
  const int first[4] = {c * h * w, h * w, w, 1}, last[4] = {h * w * c, 1, w * c, c};
  std::memcpy(made.strides, filter.format ? last : first, sizeof made.strides);
  return made;
}

int Check(const Tensor& x, const Filter& w, const Convolution& conv, const Tensor& y) {
  if (x.type != w.type || x.type != y.type || conv.mode != 1) return kBadParameter;
  if (conv.compute != kFloat) return kBadParameter;
  if (!Packed(x) || !Packed(y)) return kUnsupported;
  if (x.sizes[1] > 1 && x.sizes[2] * x.sizes[3] > 1 && LastIn(x) != (w.format == 1)) {
    return kUnsupported;
  }
  if (x.sizes[0] != y.sizes[0] || y.sizes[1] != w.sizes[0] || w.sizes[0] % conv.groups ||
      x.sizes[1] != w.sizes[1] * conv.groups) {
    return kBadParameter;
  }
  for (int i = 0; i < 2; ++i) {
    const int window = (w.sizes[2 + i] - 1) * conv.dilation[i] + 1;
    const int room = x.sizes[2 + i] + 2 * conv.pad[i] - window;
    if (room < 0 || y.sizes[2 + i] != room / conv.stride[i] + 1) return kBadParameter;
  }
  asked = {x.type, conv.math, w.format};
  return 0;
}

// Calls `visit` with the places of each product of x and w that counts for one of y.
void Visit(const Tensor& x, const Tensor& w, const Convolution& conv, const Tensor& y,
           const std::function<void(int64_t, int64_t, int64_t)>& visit) {
  const int depth = w.sizes[1], wide = y.sizes[1] / conv.groups;
  for (int n = 0; n < y.sizes[0]; ++n)
    for (int k = 0; k < y.sizes[1]; ++k)
      for (int p = 0; p < y.sizes[2]; ++p)
        for (int q = 0; q < y.sizes[3]; ++q)
          for (int r = 0; r < w.sizes[2]; ++r)
            for (int s = 0; s < w.sizes[3]; ++s) {
              const int h = p * conv.stride[0] + r * conv.dilation[0] - conv.pad[0];
              const int v = q * conv.stride[1] + s * conv.dilation[1] - conv.pad[1];
              if (h < 0 || v < 0 || h >= x.sizes[2] || v >= x.sizes[3]) continue;
              for (int c = 0; c < depth; ++c) {
                const int from = k / wide * depth + c;
                visit(int64_t{n} * x.strides[0] + from * x.strides[1] + h * x.strides[2] +
                          v * x.strides[3],
                      int64_t{k} * w.strides[0] + c * w.strides[1] + r * w.strides[2] +
                          s * w.strides[3],
                      int64_t{n} * y.strides[0] + k * y.strides[1] + p * y.strides[2] +
                          q * y.strides[3]);
              }
            }
}

// `which` of x, w and y is computed: 0, 1, 2.
template <typename T>
void Compute(int which, const Tensor& x, void* x_at, const Filter& filter, void* w_at,
             const Convolution& conv, const Tensor& y, void* y_at, std::vector<double>* made) {
  const Tensor w = Filters(filter);
  T* const at[3] = {static_cast<T*>(x_at), static_cast<T*>(w_at), static_cast<T*>(y_at)};
  const Tensor* const given[3] = {&x, &w, &y};
  std::vector<double>& sums = *made;
  sums.assign(Numbers(*given[which]), 0);
  Visit(x, w, conv, y, [&](int64_t i, int64_t j, int64_t k) {
    const int64_t places[3] = {i, j, k};
    const int a = which == 0 ? 1 : 0, b = which == 2 ? 1 : 2;
    sums[places[which]] +=
        static_cast<double>(at[a][places[a]]) * static_cast<double>(at[b][places[b]]);
  });
}

bool IsOne(const void* alpha) { return *static_cast<const float*>(alpha) == 1; }
bool IsZero(const void* beta) { return *static_cast<const float*>(beta) == 0; }

// cuDNN allocates when it first runs what is of a kind.
bool Allocates(void* stream, int kind, int number) {
  static std::set<std::pair<int, int>> known;
  return known.insert({kind, number}).second && FakeCaptures(stream);
}

int Get(int kind, const Tensor* x, const Filter* w, const Convolution* conv, const Tensor* y,
        int most, int* count, Algorithm* found) {
  if (const int wrong = Check(*x, *w, *conv, *y)) return wrong;
  (void)kind;
  for (*count = 0; *count < kAlgorithms && *count < most; ++*count) {
    found[*count] = {*count, 0, 1.0f, kMemory[*count], kInOrder[*count], conv->math, {}};
  }
  return 0;
}

int Bytes(const Tensor* x, const Filter* w, const Convolution* conv, const Tensor* y, int algorithm,
          size_t* bytes) {
  if (const int wrong = Check(*x, *w, *conv, *y)) return wrong;
  return *bytes = kMemory[algorithm], 0;
}

int Run(Handle* handle, int which, const void* alpha, const Tensor* x, const void* x_at,
        const Filter* w, const void* w_at, const Convolution* conv, int algorithm, void* workspace,
        size_t bytes, const void* beta, const Tensor* y, const void* y_at) {
  if (const int wrong = Check(*x, *w, *conv, *y)) return wrong;
  if (!IsOne(alpha) || !IsZero(beta)) return kBadParameter;
  if (algorithm == kRefused || bytes < kMemory[algorithm]) return kUnsupported;
  for (const void* address : {x_at, w_at, y_at}) {
    if (reinterpret_cast<uintptr_t>(address) % 16) return kBadParameter;
  }
  if (Allocates(handle->stream, which, algorithm)) return kAllocationFailed;
  ++runs[algorithm];
  FakeLaunch(handle->stream, [=, x = *x, w = *w, conv = *conv, y = *y] {
    if (bytes) std::memset(workspace, 0xff, bytes);
    OfType(x.type, [&](auto type) {
      Compute<decltype(type)>(which, x, const_cast<void*>(x_at), w, const_cast<void*>(w_at), conv,
                              y, const_cast<void*>(y_at), &handle->memory);
    });
  });
  void* const made = const_cast<void*>(which == 0 ? x_at : which == 1 ? w_at : y_at);
  FakeLaunch(handle->stream, [=, type = x->type] {
    OfType(type, [&](auto of) { Store<decltype(of)>(handle->memory, made); });
    FakeSpend(milliseconds[algorithm]);
  });
  return 0;
}

// cuDNN loads a kernel when it first runs it.
bool Loads(void* stream, bool gradient) { return Allocates(stream, 3 + gradient, 0); }

}  // namespace

#define MAY_FAIL(name) \
  if (const int code = FakeFails(#name)) return code

extern "C" {

int fake_live_cudnn(void) { return live; }
void fake_cudnn_time(int algorithm, float taken) { milliseconds[algorithm] = taken; }
int fake_cudnn_runs(int algorithm) { return runs[algorithm]; }
// Of the last convolution: its type, how it may multiply, and its filter's format.
void fake_cudnn_asked(int* found) {
  const int values[] = {asked.type, asked.math, asked.format};
  std::memcpy(found, values, sizeof values);
}

int cudnnCreate(Handle** handle) {
  MAY_FAIL(cudnnCreate);
  FakeNeedsContext();
  return *handle = new Handle, 0;
}
int cudnnSetStream(Handle* handle, void* stream) {
  MAY_FAIL(cudnnSetStream);
  return handle->stream = stream, 0;
}
int cudnnCreateTensorDescriptor(Tensor** tensor) {
  MAY_FAIL(cudnnCreateTensorDescriptor);
  return ++live, *tensor = new Tensor, 0;
}
int cudnnDestroyTensorDescriptor(Tensor* tensor) { return --live, delete tensor, 0; }
int cudnnSetTensor4dDescriptorEx(Tensor* tensor, int type, int n, int c, int h, int w, int ns,
                                 int cs, int hs, int ws) {
  MAY_FAIL(cudnnSetTensor4dDescriptorEx);
  *tensor = {type, {n, c, h, w}, {ns, cs, hs, ws}};
  for (int i = 0; i < 4; ++i) {
    if (tensor->sizes[i] <= 0 || tensor->strides[i] <= 0) return kBadParameter;
  }
  return 0;
}
int cudnnCreateFilterDescriptor(Filter** filter) {
  MAY_FAIL(cudnnCreateFilterDescriptor);
  return ++live, *filter = new Filter, 0;
}
int cudnnDestroyFilterDescriptor(Filter* filter) { return --live, delete filter, 0; }
int cudnnSetFilter4dDescriptor(Filter* filter, int type, int format, int k, int c, int h, int w) {
  MAY_FAIL(cudnnSetFilter4dDescriptor);
  *filter = {type, format, {k, c, h, w}};
  for (int size : filter->sizes) {
    if (size <= 0) return kBadParameter;
  }
  return 0;
}
int cudnnCreateConvolutionDescriptor(Convolution** convolution) {
  MAY_FAIL(cudnnCreateConvolutionDescriptor);
  return ++live, *convolution = new Convolution, 0;
}
int cudnnDestroyConvolutionDescriptor(Convolution* convolution) {
  return --live, delete convolution, 0;
}
int cudnnSetConvolution2dDescriptor(Convolution* convolution, int ph, int pw, int sh, int sw,
                                    int dh, int dw, int mode, int compute) {
  MAY_FAIL(cudnnSetConvolution2dDescriptor);
  if (ph < 0 || pw < 0 || sh < 1 || sw < 1 || dh < 1 || dw < 1) return kBadParameter;
  *convolution = {{ph, pw}, {sh, sw}, {dh, dw}, mode, compute};
  return 0;
}
int cudnnSetConvolutionGroupCount(Convolution* convolution, int groups) {
  MAY_FAIL(cudnnSetConvolutionGroupCount);
  return convolution->groups = groups, 0;
}
int cudnnSetConvolutionMathType(Convolution* convolution, int math) {
  MAY_FAIL(cudnnSetConvolutionMathType);
  return convolution->math = math, 0;
}
int cudnnGetConvolutionForwardAlgorithm_v7(Handle*, Tensor* x, Filter* w, Convolution* conv,
                                           Tensor* y, int most, int* count, Algorithm* found) {
  MAY_FAIL(cudnnGetConvolutionForwardAlgorithm_v7);
  return Get(2, x, w, conv, y, most, count, found);
}
int cudnnGetConvolutionBackwardDataAlgorithm_v7(Handle*, Filter* w, Tensor* y, Convolution* conv,
                                                Tensor* x, int most, int* count, Algorithm* found) {
  MAY_FAIL(cudnnGetConvolutionBackwardDataAlgorithm_v7);
  return Get(0, x, w, conv, y, most, count, found);
}
int cudnnGetConvolutionBackwardFilterAlgorithm_v7(Handle*, Tensor* x, Tensor* y, Convolution* conv,
                                                  Filter* w, int most, int* count,
                                                  Algorithm* found) {
  MAY_FAIL(cudnnGetConvolutionBackwardFilterAlgorithm_v7);
  return Get(1, x, w, conv, y, most, count, found);
}
int cudnnGetConvolutionForwardWorkspaceSize(Handle*, Tensor* x, Filter* w, Convolution* conv,
                                            Tensor* y, int algorithm, size_t* bytes) {
  return Bytes(x, w, conv, y, algorithm, bytes);
}
int cudnnGetConvolutionBackwardDataWorkspaceSize(Handle*, Filter* w, Tensor* y, Convolution* conv,
                                                 Tensor* x, int algorithm, size_t* bytes) {
  return Bytes(x, w, conv, y, algorithm, bytes);
}
int cudnnGetConvolutionBackwardFilterWorkspaceSize(Handle*, Tensor* x, Tensor* y, Convolution* conv,
                                                   Filter* w, int algorithm, size_t* bytes) {
  return Bytes(x, w, conv, y, algorithm, bytes);
}
int cudnnConvolutionForward(Handle* handle, const void* alpha, Tensor* x, const void* x_at,
                            Filter* w, const void* w_at, Convolution* conv, int algorithm,
                            void* workspace, size_t bytes, const void* beta, Tensor* y,
                            void* y_at) {
  MAY_FAIL(cudnnConvolutionForward);
  return Run(handle, 2, alpha, x, x_at, w, w_at, conv, algorithm, workspace, bytes, beta, y, y_at);
}
int cudnnConvolutionBackwardData(Handle* handle, const void* alpha, Filter* w, const void* w_at,
                                 Tensor* y, const void* y_at, Convolution* conv, int algorithm,
                                 void* workspace, size_t bytes, const void* beta, Tensor* x,
                                 void* x_at) {
  MAY_FAIL(cudnnConvolutionBackwardData);
  return Run(handle, 0, alpha, x, x_at, w, w_at, conv, algorithm, workspace, bytes, beta, y, y_at);
}
int cudnnConvolutionBackwardFilter(Handle* handle, const void* alpha, Tensor* x, const void* x_at,
                                   Tensor* y, const void* y_at, Convolution* conv, int algorithm,
                                   void* workspace, size_t bytes, const void* beta, Filter* w,
                                   void* w_at) {
  MAY_FAIL(cudnnConvolutionBackwardFilter);
  return Run(handle, 1, alpha, x, x_at, w, w_at, conv, algorithm, workspace, bytes, beta, y, y_at);
}
int cudnnCreatePoolingDescriptor(Pooling** pooling) {
  MAY_FAIL(cudnnCreatePoolingDescriptor);
  return ++live, *pooling = new Pooling, 0;
}
int cudnnDestroyPoolingDescriptor(Pooling* pooling) { return --live, delete pooling, 0; }
int cudnnSetPooling2dDescriptor(Pooling* pooling, int mode, int nan, int wh, int ww, int ph, int pw,
                                int sh, int sw) {
  MAY_FAIL(cudnnSetPooling2dDescriptor);
  if (ph < 0 || pw < 0 || sh < 1 || sw < 1 || wh < 1 || ww < 1) return kBadParameter;
  *pooling = {mode, nan, {wh, ww}, {ph, pw}, {sh, sw}};
  return 0;
}
int cudnnPoolingForward(Handle* handle, Pooling* pooling, const void* alpha, Tensor* x,
                        const void* x_at, const void* beta, Tensor* y, void* y_at) {
  MAY_FAIL(cudnnPoolingForward);
  if (const int wrong = Check(*pooling, *x, *y)) return wrong;
  if (!IsOne(alpha) || !IsZero(beta)) return kBadParameter;
  if (Loads(handle->stream, false)) return kAllocationFailed;
  FakeLaunch(handle->stream,
             [=, pooling = *pooling, x = *x, y = *y] { Pool(pooling, x, x_at, y, y_at); });
  return 0;
}
int cudnnPoolingBackward(Handle* handle, Pooling* pooling, const void* alpha, Tensor* y,
                         const void* y_at, Tensor* dy, const void* dy_at, Tensor* x,
                         const void* x_at, const void* beta, Tensor* dx, void* dx_at) {
  MAY_FAIL(cudnnPoolingBackward);
  if (const int wrong = Check(*pooling, *x, *y)) return wrong;
  if (!IsOne(alpha) || !IsZero(beta) || x != dx || y != dy) return kBadParameter;
  if (Loads(handle->stream, true)) return kAllocationFailed;
  FakeLaunch(handle->stream, [=, pooling = *pooling, x = *x, y = *y] {
    PoolGradient(pooling, x, x_at, y, y_at, dy_at, dx_at);
  });
  return 0;
}
int cudnnTransformTensor(Handle* handle, const void* alpha, Tensor* from, const void* from_at,
                         const void* beta, Tensor* to, void* to_at) {
  MAY_FAIL(cudnnTransformTensor);
  if (!IsOne(alpha) || !IsZero(beta) || from->type != to->type ||
      std::memcmp(from->sizes, to->sizes, sizeof from->sizes)) {
    return kBadParameter;
  }
  FakeLaunch(handle->stream, [from_at, to_at, from = *from, to = *to] {
    const int* s = from.sizes;
    const size_t size = from.type == kFloat ? 4 : 2;
    const auto place = [](const Tensor& x, int n, int c, int h, int w) {
      return int64_t{n} * x.strides[0] + c * x.strides[1] + h * x.strides[2] + w * x.strides[3];
    };
    for (int n = 0; n < s[0]; ++n)
      for (int c = 0; c < s[1]; ++c)
        for (int h = 0; h < s[2]; ++h)
          for (int w = 0; w < s[3]; ++w)
            std::memcpy(static_cast<char*>(to_at) + place(to, n, c, h, w) * size,
                        static_cast<const char*>(from_at) + place(from, n, c, h, w) * size, size);
  });
  return 0;
}

}  // extern "C"
