// cuDNN without a GPU: plain loops, enqueued on streams of the fake driver. Its engines compute the
// same; one takes more memory than is sensible, one depends on the order of its sums, one rounds
// its factors, and one is refused when it is to run. It is as strict as cuDNN about layouts, sizes,
// types of attributes and the life of descriptors. What it does first it does with memory that it
// allocates, so that no capture may be the first to call it.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <set>
#include <utility>
#include <vector>

#include "fake_convolutions.h"
#include "fake_cuda.h"
#include "fake_images.h"
#include "fake_pooling.h"

namespace {

constexpr int kEngines = 6;
constexpr int kNoNote = -1, kTensorCores = 0, kNondeterministic = 4;
// In the order in which it gives them: what they take, and what they do to numbers.
constexpr int64_t kMemory[kEngines] = {int64_t{1} << 40, 1000, 1000, 1000, 0, 1000};
constexpr int kNotes[kEngines] = {kNoNote, kNondeterministic, kTensorCores,
                                  kNoNote, kNoNote,           kNoNote};
constexpr int kRefused = 3, kOfFallback = 5;

struct Handle {
  void* stream = nullptr;
  std::vector<double> memory;  // what a convolution's first kernel leaves for its second one
};

std::atomic<int> live{0};
int runs[kEngines] = {};
float milliseconds[kEngines] = {};

// Calls `visit` with the places of each product of x and w that counts for one of y.
void Visit(const Operation& op, const std::function<void(int64_t, int64_t, int64_t)>& visit) {
  const Tensor &x = op.tensors[0], &w = op.tensors[1], &y = op.tensors[2];
  const Convolution& conv = op.conv;
  const int depth = w.sizes[1], wide = y.sizes[1] / op.groups;
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

template <typename T>
void Compute(const Operation& op, void* const (&addresses)[3], std::vector<double>* made) {
  T* at[3];
  for (int i = 0; i < 3; ++i) at[i] = static_cast<T*>(addresses[i]);
  std::vector<double>& sums = *made;
  sums.assign(Numbers(op.tensors[op.which]), 0);
  Visit(op, [&](int64_t i, int64_t j, int64_t k) {
    const int64_t places[3] = {i, j, k};
    const int a = op.which == 0 ? 1 : 0, b = op.which == 2 ? 1 : 2;
    sums[places[op.which]] +=
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

int Run(Handle* handle, const Operation& op, int engine, void* const (&at)[3], void* workspace) {
  if (engine == kRefused) return kUnsupported;
  for (const void* address : at) {
    if (reinterpret_cast<uintptr_t>(address) % 16) return kBadParameter;
  }
  if (Allocates(handle->stream, op.which, engine)) return kAllocationFailed;
  ++runs[engine];
  const int type = op.tensors[0].type;
  FakeLaunch(handle->stream, [=, x = at[0], w = at[1], y = at[2]] {
    if (kMemory[engine]) std::memset(workspace, 0xff, kMemory[engine]);
    OfType(type, [&](auto of) { Compute<decltype(of)>(op, {x, w, y}, &handle->memory); });
  });
  FakeLaunch(handle->stream, [=, made = at[op.which]] {
    OfType(type, [&](auto of) { Store<decltype(of)>(handle->memory, made); });
    FakeSpend(milliseconds[engine]);
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
void fake_cudnn_time(int engine, float taken) { milliseconds[engine] = taken; }
int fake_cudnn_runs(int engine) { return runs[engine]; }

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
int cudnnBackendCreateDescriptor(int kind, Descriptor** descriptor) {
  MAY_FAIL(cudnnBackendCreateDescriptor);
  *descriptor = new Descriptor{kind};
  descriptors.insert(*descriptor);
  return ++live, 0;
}
int cudnnBackendDestroyDescriptor(Descriptor* descriptor) {
  descriptors.erase(descriptor);
  return --live, delete descriptor, 0;
}
int cudnnBackendSetAttribute(Descriptor* descriptor, int name, int type, int64_t count,
                             const void* values) {
  MAY_FAIL(cudnnBackendSetAttribute);
  const auto known = kAttributes.find(name);
  if (descriptor->finalized || known == kAttributes.end() ||
      known->second != std::make_pair(descriptor->kind, type)) {
    return kBadParameter;
  }
  const char* const bytes = static_cast<const char*>(values);
  descriptor->attributes[name].assign(bytes, bytes + count * Bytes(type));
  return 0;
}
int cudnnBackendFinalize(Descriptor* descriptor) {
  MAY_FAIL(cudnnBackendFinalize);
  if (descriptor->finalized) return kBadParameter;
  if (const int wrong = Finalize(*descriptor)) return wrong;
  return descriptor->finalized = true, 0;
}
int cudnnBackendGetAttribute(Descriptor* descriptor, int name, int type, int64_t most,
                             int64_t* count, void* values) {
  MAY_FAIL(cudnnBackendGetAttribute);
  Descriptor** const parts = static_cast<Descriptor**>(values);
  if (descriptor->kind == kHeuristics && name == 202 && type == kPart && descriptor->finalized) {
    const bool last = descriptor->One<int>(200) == 2;
    *count = last ? 1 : kOfFallback;
    for (int i = 0; i < *count && i < most; ++i) {
      if (parts[i]->kind != kConfig) return kBadParameter;
      parts[i]->engine = last ? kOfFallback : i;
      parts[i]->attributes[201] = descriptor->attributes.at(201);
    }
    return 0;
  }
  if (descriptor->kind == kConfig && name == 300 && type == kPart && descriptor->engine >= 0) {
    if (most != 1 || parts[0]->kind != kEngine) return kBadParameter;
    return parts[0]->engine = descriptor->engine, *count = 1, 0;
  }
  if (descriptor->kind == kEngine && name == 1303 && type == kNote && descriptor->engine >= 0) {
    *count = kNotes[descriptor->engine] != kNoNote;
    if (*count && most) *static_cast<int*>(values) = kNotes[descriptor->engine];
    return 0;
  }
  if (descriptor->kind == kEngine && name == 1301 && type == kInt64 && descriptor->engine >= 0) {
    *static_cast<int64_t*>(values) = descriptor->engine;
    return *count = 1, 0;
  }
  if (descriptor->kind == kPlan && name == 402 && type == kInt64 && descriptor->finalized) {
    *static_cast<int64_t*>(values) = kMemory[descriptor->One<Descriptor*>(401)->engine];
    return *count = 1, 0;
  }
  return kBadParameter;
}
int cudnnBackendExecute(Handle* handle, Descriptor* plan, Descriptor* pack) {
  MAY_FAIL(cudnnBackendExecute);
  if (!plan->finalized || !pack->finalized || handle != plan->One<Handle*>(400)) {
    return kBadParameter;
  }
  const Descriptor* config = plan->One<Descriptor*>(401);
  if (!descriptors.count(config)) return kBadParameter;
  Operation operation;
  if (const int wrong = ReadGraph(config->One<Descriptor*>(201), &operation)) return wrong;
  const std::vector<int64_t> numbers = pack->All<int64_t>(1000);
  const std::vector<void*> addresses = pack->All<void*>(1001);
  void* at[3] = {};
  for (int i = 0; i < 3; ++i) {
    for (size_t j = 0; j < numbers.size(); ++j) {
      if (numbers[j] == operation.numbers[i]) at[i] = addresses[j];
    }
    if (at[i] == nullptr) return kBadParameter;
  }
  return Run(handle, operation, config->engine, at, pack->One<void*>(1003));
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
