// cuDNN without a GPU: plain loops, enqueued on streams of the fake driver. Its engines compute the
// same; one takes more memory than is sensible, one depends on the order of its sums, one rounds
// its factors, and one is refused when it is to run. It is as strict as cuDNN about layouts, sizes,
// types of attributes and the life of descriptors. What it does first it does with memory that it
// allocates, so that no capture may be the first to call it.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

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

struct Convolution {
  int64_t pad[2], stride[2], dilation[2];
};
struct Handle {
  void* stream = nullptr;
  std::vector<double> memory;  // what a convolution's first kernel leaves for its second one
};

// Kinds of descriptors, their attributes and types, as in cudnn_graph.h.
enum Kind { kConvolution = 1, kEngine = 2, kConfig = 3, kHeuristics = 4, kPlan = 5, kForward = 10 };
enum OtherKind { kOfFilter = 11, kOfInput = 12, kGraph = 15, kPack = 16, kTensor = 17 };
enum Type { kHandleOf, kDataOf, kInt64 = 3, kFloatOf, kPointer = 6, kMode, kHeuristicsMode };
enum OtherType { kNote = 11, kPart = 15 };

struct Descriptor {
  int kind = 0;
  int engine = -1;
  bool finalized = false;
  std::map<int, std::vector<char>> attributes = {};

  template <typename T>
  std::vector<T> All(int name) const {
    const auto found = attributes.find(name);
    if (found == attributes.end()) return {};
    std::vector<T> values(found->second.size() / sizeof(T));
    std::memcpy(values.data(), found->second.data(), values.size() * sizeof(T));
    return values;
  }
  template <typename T>
  T One(int name, T missing = T()) const {
    const std::vector<T> values = All<T>(name);
    return values.size() == 1 ? values[0] : missing;
  }
};

// What an attribute is of, and the type of its values.
const std::map<int, std::pair<int, int>> kAttributes = {
    {100, {kConvolution, kDataOf}}, {101, {kConvolution, kMode}},
    {102, {kConvolution, kInt64}},  {103, {kConvolution, kInt64}},
    {104, {kConvolution, kInt64}},  {105, {kConvolution, kInt64}},
    {106, {kConvolution, kInt64}},  {200, {kHeuristics, kHeuristicsMode}},
    {201, {kHeuristics, kPart}},    {400, {kPlan, kHandleOf}},
    {401, {kPlan, kPart}},          {700, {kForward, kFloatOf}},
    {701, {kForward, kFloatOf}},    {702, {kForward, kPart}},
    {703, {kForward, kPart}},       {704, {kForward, kPart}},
    {705, {kForward, kPart}},       {706, {kOfInput, kFloatOf}},
    {707, {kOfInput, kFloatOf}},    {708, {kOfInput, kPart}},
    {709, {kOfInput, kPart}},       {710, {kOfInput, kPart}},
    {711, {kOfInput, kPart}},       {712, {kOfFilter, kFloatOf}},
    {713, {kOfFilter, kFloatOf}},   {714, {kOfFilter, kPart}},
    {715, {kOfFilter, kPart}},      {716, {kOfFilter, kPart}},
    {717, {kOfFilter, kPart}},      {800, {kGraph, kHandleOf}},
    {801, {kGraph, kPart}},         {900, {kTensor, kInt64}},
    {901, {kTensor, kDataOf}},      {902, {kTensor, kInt64}},
    {903, {kTensor, kInt64}},       {906, {kTensor, kInt64}},
    {1000, {kPack, kInt64}},        {1001, {kPack, kPointer}},
    {1003, {kPack, kPointer}},
};
size_t Bytes(int type) {
  return type == kInt64 || type == kHandleOf || type == kPointer || type == kPart ? 8 : 4;
}

std::atomic<int> live{0};
std::set<const Descriptor*> descriptors;
int runs[kEngines] = {};
float milliseconds[kEngines] = {};

// A convolution, or one of its gradients, read from its operation.
struct Operation {
  int which = 0;  // of x, w and y is computed: 0, 1, 2
  Tensor tensors[3];
  int64_t numbers[3];
  Convolution conv;
  int groups = 1;
};

int ReadTensor(const Descriptor* given, Tensor* tensor, int64_t* number) {
  if (!descriptors.count(given) || given->kind != kTensor || !given->finalized) {
    return kBadParameter;
  }
  tensor->type = given->One<int>(901, -1);
  *number = given->One<int64_t>(906, -1);
  const std::vector<int64_t> sizes = given->All<int64_t>(902), strides = given->All<int64_t>(903);
  if (sizes.size() != 4 || strides.size() != 4 || given->One<int64_t>(900) != 16) {
    return kBadParameter;
  }
  for (int i = 0; i < 4; ++i) {
    if (sizes[i] <= 0 || strides[i] <= 0) return kBadParameter;
    tensor->sizes[i] = sizes[i];
    tensor->strides[i] = strides[i];
  }
  return 0;
}

int ReadConvolution(const Descriptor* given, Convolution* conv) {
  if (!descriptors.count(given) || given->kind != kConvolution || !given->finalized ||
      given->One<int>(100, -1) != kFloat || given->One<int>(101) != 1 ||
      given->One<int64_t>(106) != 2 || given->All<int64_t>(104) != given->All<int64_t>(105)) {
    return kBadParameter;
  }
  const auto read = [&](int name, int64_t least, int64_t* to) {
    const std::vector<int64_t> values = given->All<int64_t>(name);
    if (values.size() != 2 || values[0] < least || values[1] < least) return false;
    std::memcpy(to, values.data(), 2 * sizeof *to);
    return true;
  };
  const bool whole =
      read(105, 0, conv->pad) && read(103, 1, conv->stride) && read(102, 1, conv->dilation);
  return whole ? 0 : kBadParameter;
}

int Check(Operation* found) {
  const Tensor &x = found->tensors[0], &w = found->tensors[1], &y = found->tensors[2];
  if (x.type != w.type || x.type != y.type) return kBadParameter;
  if (!Packed(x) || !Packed(y) || !Packed(w)) return kUnsupported;
  const bool one = w.sizes[1] == 1 || w.sizes[2] * w.sizes[3] == 1;
  if (x.sizes[1] > 1 && x.sizes[2] * x.sizes[3] > 1 && !one && LastIn(x) != LastIn(w)) {
    return kUnsupported;
  }
  if (x.sizes[1] % w.sizes[1]) return kBadParameter;
  found->groups = x.sizes[1] / w.sizes[1];
  if (x.sizes[0] != y.sizes[0] || y.sizes[1] != w.sizes[0] || w.sizes[0] % found->groups) {
    return kBadParameter;
  }
  const Convolution& conv = found->conv;
  for (int i = 0; i < 2; ++i) {
    const int64_t window = (w.sizes[2 + i] - 1) * conv.dilation[i] + 1;
    const int64_t room = x.sizes[2 + i] + 2 * conv.pad[i] - window;
    if (room < 0 || y.sizes[2 + i] != room / conv.stride[i] + 1) return kBadParameter;
  }
  return 0;
}

int ReadOperation(const Descriptor* given, Operation* found) {
  if (!descriptors.count(given)) return kBadParameter;
  const int first = given->kind == kForward ? 700 : given->kind == kOfInput ? 706 : 712;
  found->which = given->kind == kForward ? 2 : given->kind == kOfInput ? 0 : 1;
  if (given->One<float>(first) != 1 || given->One<float>(first + 1, 1) != 0) return kBadParameter;
  if (const int wrong = ReadConvolution(given->One<Descriptor*>(first + 2), &found->conv)) {
    return wrong;
  }
  const int places[3] = {1, 0, 2};  // attributes: w, x, y
  for (int i = 0; i < 3; ++i) {
    const int place = places[i];
    const Descriptor* tensor = given->One<Descriptor*>(first + 3 + i);
    if (const int wrong = ReadTensor(tensor, &found->tensors[place], &found->numbers[place])) {
      return wrong;
    }
  }
  return Check(found);
}

int ReadGraph(const Descriptor* given, Operation* found) {
  if (!descriptors.count(given) || given->kind != kGraph || !given->finalized ||
      given->One<Handle*>(800) == nullptr) {
    return kBadParameter;
  }
  return ReadOperation(given->One<Descriptor*>(801), found);
}

int Finalize(const Descriptor& made) {
  Tensor tensor;
  Convolution conv;
  Operation operation;
  int64_t number;
  switch (made.kind) {
    case kPlan: {
      const Descriptor* config = made.One<Descriptor*>(401);
      const bool whole = descriptors.count(config) && config->kind == kConfig;
      return whole && made.One<Handle*>(400) != nullptr ? 0 : kBadParameter;
    }
    case kHeuristics:
      return ReadGraph(made.One<Descriptor*>(201), &operation);
    case kGraph:
      return ReadOperation(made.One<Descriptor*>(801), &operation);
    case kPack:
      return made.All<int64_t>(1000).size() == made.All<void*>(1001).size() ? 0 : kBadParameter;
  }
  // What these refer to is looked at as if they were finalized.
  Descriptor whole = made;
  whole.finalized = true;
  descriptors.insert(&whole);
  const int wrong = made.kind == kTensor        ? ReadTensor(&whole, &tensor, &number)
                    : made.kind == kConvolution ? ReadConvolution(&whole, &conv)
                                                : ReadOperation(&whole, &operation);
  descriptors.erase(&whole);
  return wrong;
}

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
