// Descriptors of the fake cuDNN's graph API, and the convolutions that they are of.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "fake_images.h"

struct Convolution {
  int64_t pad[2], stride[2], dilation[2];
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
inline const std::map<int, std::pair<int, int>> kAttributes = {
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
inline size_t Bytes(int type) {
  return type == kInt64 || type == kHandleOf || type == kPointer || type == kPart ? 8 : 4;
}

inline std::set<const Descriptor*> descriptors;  // those that live

// A convolution, or one of its gradients, read from its operation.
struct Operation {
  int which = 0;  // of x, w and y is computed: 0, 1, 2
  Tensor tensors[3];
  int64_t numbers[3];
  Convolution conv;
  int groups = 1;
};

inline int ReadTensor(const Descriptor* given, Tensor* tensor, int64_t* number) {
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

inline int ReadConvolution(const Descriptor* given, Convolution* conv) {
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

inline int Check(Operation* found) {
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

inline int ReadOperation(const Descriptor* given, Operation* found) {
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

inline int ReadGraph(const Descriptor* given, Operation* found) {
  if (!descriptors.count(given) || given->kind != kGraph || !given->finalized ||
      given->One<void*>(800) == nullptr) {
    return kBadParameter;
  }
  return ReadOperation(given->One<Descriptor*>(801), found);
}

inline int Finalize(const Descriptor& made) {
  Tensor tensor;
  Convolution conv;
  Operation operation;
  int64_t number;
  switch (made.kind) {
    case kPlan: {
      const Descriptor* config = made.One<Descriptor*>(401);
      const bool whole = descriptors.count(config) && config->kind == kConfig;
      return whole && made.One<void*>(400) != nullptr ? 0 : kBadParameter;
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
