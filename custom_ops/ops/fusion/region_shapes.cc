#include "custom_ops/ops/fusion/region_shapes.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "custom_ops/ops/sizes.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

using ::tensorflow::DataType;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::PartialTensorShape;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using Kind = RegionStep::Kind;
using HomeKind = ValueHome::Kind;

constexpr int64_t kArenaAlignment = 64;

template <typename... Parts>
absl::Status Wrong(Parts... parts) {
  return absl::InvalidArgumentError(absl::StrCat("region: ", parts...));
}

std::vector<int64_t> SizesOf(const TensorShape& shape) {
  const auto sizes = shape.dim_sizes();
  return {sizes.begin(), sizes.end()};
}

class Inference {
 public:
  Inference(const CompiledRegion& compiled, const std::vector<const Tensor*>& variables,
            RegionSteps* steps)
      : compiled_(compiled), region_(compiled.region), held_(variables), steps_(*steps) {
    for (const Tensor* variable : variables) {
      variables_.push_back(variable == nullptr ? TensorShape() : variable->shape());
    }
  }

  absl::StatusOr<RegionShapes> Run(const std::vector<TensorShape>& inputs) {
    for (const TensorShape& shape : inputs) TFMEM_RETURN_IF_ERROR(Add(shape));
    for (size_t at = 0; at < region_.steps.size(); ++at) {
      TFMEM_RETURN_IF_ERROR(RunStep(at));
      shapes_.workspace = std::max(shapes_.workspace, steps_.WorkspaceBytes(at));
    }
    TFMEM_RETURN_IF_ERROR(Place());
    return std::move(shapes_);
  }

 private:
  absl::Status RunStep(int at) {
    const RegionStep& step = region_.steps[at];
    switch (step.kind) {
      case Kind::kKernel:
        return RunKernel(at, step);
      case Kind::kCall:
        return RunCall(at, step);
      case Kind::kView:
        return RunView(step);
      case Kind::kRead:
        return Add(variables_[step.variables[0]]);
      case Kind::kAssign:
        variables_[step.variables[0]] = shapes_.values[step.inputs[0]];
        return absl::OkStatus();
    }
    return absl::OkStatus();
  }

  absl::Status RunKernel(int at, const RegionStep& step) {
    const Expression& program = region_.programs[step.program];
    std::vector<Shape> inputs;
    for (int input : step.inputs) inputs.push_back(SizesOf(shapes_.values[input]));
    TFMEM_ASSIGN_OR_RETURN(const std::vector<Shape> outputs,
                           steps_.PrepareKernel(at, program, inputs));
    for (const Shape& shape : outputs) TFMEM_RETURN_IF_ERROR(Add(shape));
    return absl::OkStatus();
  }

  absl::Status RunCall(int at, const RegionStep& step) {
    std::vector<PartialTensorShape> outputs(step.outputs);
    for (int i = 0; i < step.outputs; ++i) {
      TFMEM_RETURN_IF_ERROR(PartialTensorShape::BuildPartialTensorShape(
          region_.values[step.first_output + i].shape, &outputs[i]));
    }
    const auto known = [](const PartialTensorShape& shape) { return shape.IsFullyDefined(); };
    if (!std::all_of(outputs.begin(), outputs.end(), known)) {
      std::vector<TensorShape> inputs;
      for (int input : step.inputs) inputs.push_back(shapes_.values[input]);
      std::vector<const Tensor*> variables;
      for (int variable : step.variables) variables.push_back(held_[variable]);
      TFMEM_ASSIGN_OR_RETURN(outputs, compiled_.calls[at]->InferShapes(inputs, variables));
    }
    for (const PartialTensorShape& output : outputs) {
      TensorShape shape;
      if (!output.AsTensorShape(&shape)) {
        return absl::UnimplementedError(absl::StrCat(
            "region: a call of ", step.op, " gives shape ", output.DebugString(),
            "; a region runs only calls whose shapes follow from their inputs' shapes"));
      }
      TFMEM_RETURN_IF_ERROR(Add(shape));
    }
    return steps_.PrepareCall(at, shapes_.values);
  }

  absl::Status RunView(const RegionStep& step) {
    const TensorShape& input = shapes_.values[step.inputs[0]];
    std::vector<int64_t> sizes = region_.values[step.first_output].shape;
    Size numbers = 1;
    int64_t* unknown = nullptr;
    for (int64_t& size : sizes) {
      if (size < 0) {
        unknown = &size;
      } else {
        numbers = numbers * size;
      }
    }
    if (unknown != nullptr) {
      *unknown = numbers.value() > 0 ? input.num_elements() / numbers.value() : 0;
      numbers = numbers * *unknown;
    }
    if (numbers.value() != input.num_elements()) {
      return Wrong("a view gives shape [", absl::StrJoin(sizes, ","), "]", " to a value of shape ",
                   input.DebugString());
    }
    return Add(sizes);
  }

  absl::Status Add(const std::vector<int64_t>& sizes) {
    TensorShape shape;
    TFMEM_RETURN_IF_ERROR(BuildShape(sizes, &shape));
    return Add(shape);
  }

  absl::Status Add(const TensorShape& shape) {
    const RegionType& declared = region_.values[shapes_.values.size()];
    bool fits = static_cast<int>(declared.shape.size()) == shape.dims();
    for (int i = 0; fits && i < shape.dims(); ++i) {
      fits = declared.shape[i] < 0 || declared.shape[i] == shape.dim_size(i);
    }
    if (!fits) {
      return Wrong("value ", shapes_.values.size(), " has shape ", shape.DebugString(),
                   "; expected [", absl::StrJoin(declared.shape, ","), "]");
    }
    if (!(Size(shape.num_elements()) * BytesOf(declared.dtype)).ok()) {
      return Wrong("value ", shapes_.values.size(), " has shape ", shape.DebugString(),
                   ", of more bytes than 64 bits count");
    }
    shapes_.values.push_back(shape);
    return absl::OkStatus();
  }

  int64_t Bytes(int value) const {
    return shapes_.values[value].num_elements() * BytesOf(region_.values[value].dtype);
  }

  // Outputs take the memory of inputs that die there, where they may.
  absl::Status Place() {
    const RegionFlow& flow = compiled_.flow;
    Size all = shapes_.workspace;                          // bytes, if no value shared its memory
    std::vector<int> interval(region_.values.size(), -1);  // of each root
    std::vector<Interval> intervals;
    shapes_.reused.resize(region_.steps.size());
    for (size_t at = 0; at < region_.steps.size(); ++at) {
      const RegionStep& step = region_.steps[at];
      std::vector<int>& reused = shapes_.reused[at];
      for (int i = 0; i < step.outputs; ++i) {
        reused.push_back(step.kind == Kind::kKernel ? Reusable(at, i, reused) : -1);
      }
      for (int i = 0; i < step.outputs; ++i) {
        const int value = step.first_output + i;
        const ValueHome& home = flow.homes[value];
        if (flow.root[value] != value || home.kind != HomeKind::kArena) continue;
        if (reused[i] >= 0) {
          interval[value] = interval[flow.root[step.inputs[reused[i]]]];
          intervals[interval[value]].last = home.last_use;
        } else {
          const Size room = Size(Bytes(value)) + (kArenaAlignment - 1);
          all = all + room;
          if (!all.ok()) return Wrong("its values have more bytes than 64 bits count");
          const int64_t blocks = room.value() / kArenaAlignment;
          interval[value] = intervals.size();
          intervals.push_back({blocks * kArenaAlignment, home.born, home.last_use});
        }
      }
    }
    const int64_t values = PlaceInArena(&intervals);
    shapes_.arena_bytes = values + shapes_.workspace;
    shapes_.workspace = values;
    for (int place : interval) {
      shapes_.offsets.push_back(place < 0 ? 0 : intervals[place].offset);
    }
    return absl::OkStatus();
  }

  // The input in whose memory an output of a kernel may be written, none of those that are taken.
  int Reusable(int at, int output, const std::vector<int>& taken) const {
    const RegionStep& step = region_.steps[at];
    const RegionFlow& flow = compiled_.flow;
    const int value = step.first_output + output, inputs = step.inputs.size();
    for (int i = 0; i < inputs; ++i) {
      const int root = flow.root[step.inputs[i]];
      const auto same = [&](int other) { return flow.root[other] == root; };
      if (flow.homes[root].last_use == at && Bytes(root) == Bytes(value) &&
          std::count_if(step.inputs.begin(), step.inputs.end(), same) == 1 &&
          std::count(taken.begin(), taken.end(), i) == 0 &&
          Fit(flow.homes[root], flow.homes[flow.root[value]], at) &&
          steps_.MayShare(at, i, output)) {
        return i;
      }
    }
    return -1;
  }

  // Whether what dies at a step may become what is given there.
  bool Fit(const ValueHome& from, const ValueHome& to, int at) const {
    if (to.kind == HomeKind::kArena) return from.kind == HomeKind::kArena;
    if (to.kind == HomeKind::kOutput) return from.kind == HomeKind::kInput;
    if (to.kind != HomeKind::kAssigned || from.kind != HomeKind::kVariable ||
        from.number != to.number) {
      return false;
    }
    // No step reads the variable between the kernel and the assignment.
    for (size_t later = at + 1; later < region_.steps.size(); ++later) {
      const RegionStep& step = region_.steps[later];
      if (step.variables.empty()) continue;
      const bool same = step.variables[0] == to.number;
      if (step.kind == Kind::kAssign && same) return true;
      if (step.kind == Kind::kCall || (step.kind == Kind::kRead && same)) return false;
      if (step.kind == Kind::kRead && compiled_.uses[step.variables[0]].called) return false;
    }
    return false;
  }

  const CompiledRegion& compiled_;
  const Region& region_;
  const std::vector<const Tensor*>& held_;
  RegionSteps& steps_;
  std::vector<TensorShape> variables_;
  RegionShapes shapes_;
};

void Append(const TensorShape& shape, ShapesKey* key) {
  key->push_back(shape.dims());
  for (int i = 0; i < shape.dims(); ++i) key->push_back(shape.dim_size(i));
}

}  // namespace

DataType DataTypeOf(ValueDType dtype) {
  static constexpr DataType kTypes[] = {
      tensorflow::DT_FLOAT,    tensorflow::DT_DOUBLE,    tensorflow::DT_HALF,
      tensorflow::DT_BFLOAT16, tensorflow::DT_INT32,     tensorflow::DT_INT64,
      tensorflow::DT_BOOL,     tensorflow::DT_INT8,      tensorflow::DT_INT16,
      tensorflow::DT_UINT8,    tensorflow::DT_UINT16,    tensorflow::DT_UINT32,
      tensorflow::DT_UINT64,   tensorflow::DT_COMPLEX64, tensorflow::DT_COMPLEX128,
  };
  return kTypes[static_cast<int>(dtype)];
}

std::vector<VariableUse> UsesOf(const Region& region) {
  std::vector<VariableUse> uses;
  for (const RegionType& type : region.variables)
    uses.emplace_back().dtype = DataTypeOf(type.dtype);
  for (const RegionStep& step : region.steps) {
    for (int variable : step.variables) {
      VariableUse& use = uses[variable];
      use.called |= step.kind == Kind::kCall;
      use.read |= step.kind == Kind::kRead && !use.assigned;
      use.assigned |= step.kind == Kind::kAssign;
    }
  }
  return uses;
}

absl::StatusOr<std::unique_ptr<CompiledRegion>> CompiledRegion::Create(OpKernelConstruction* ctx,
                                                                       Region given) {
  auto compiled = std::make_unique<CompiledRegion>();
  compiled->region = std::move(given);
  const Region& region = compiled->region;
  compiled->uses = UsesOf(region);
  for (const RegionStep& step : region.steps) {
    auto& call = compiled->calls.emplace_back();
    if (step.kind != Kind::kCall) continue;
    InnerSignature signature;
    signature.inputs.resize(step.variables.size(), tensorflow::DT_RESOURCE);
    for (int input : step.inputs) {
      signature.inputs.push_back(DataTypeOf(region.values[input].dtype));
    }
    for (int i = 0; i < step.outputs; ++i) {
      signature.outputs.push_back(DataTypeOf(region.values[step.first_output + i].dtype));
    }
    const std::string member = step.members.empty() ? step.op : step.members.front();
    TFMEM_ASSIGN_OR_RETURN(
        call, InnerKernel::Create(ctx, step.op, step.attrs,
                                  absl::StrCat(ctx->def().name(), "/", member), signature));
  }
  std::vector<bool> keeps;
  for (const auto& call : compiled->calls) keeps.push_back(call != nullptr && call->keeps());
  compiled->flow = FlowOf(region, keeps);
  for (VariableUse& use : compiled->uses) use.within = !compiled->flow.calls_variables;
  for (const RegionStep& step : region.steps) {
    if (step.kind != Kind::kRead) continue;
    compiled->uses[step.variables[0]].within &= !compiled->flow.homes[step.first_output].shared;
  }
  return compiled;
}

std::vector<const Tensor*> ValuesOf(const RegionVariables& variables, int count) {
  std::vector<const Tensor*> values;
  for (int i = 0; i < count; ++i) values.push_back(variables.Now(i));
  return values;
}

ShapesKey KeyOf(tensorflow::OpKernelContext* ctx, int inputs,
                const std::vector<const Tensor*>& variables) {
  ShapesKey key;
  for (int i = 0; i < inputs; ++i) Append(ctx->input(i).shape(), &key);
  for (const Tensor* value : variables) {
    if (value == nullptr) {
      key.push_back(-1);
    } else {
      Append(value->shape(), &key);
    }
  }
  return key;
}

absl::StatusOr<RegionShapes> ShapesOf(const CompiledRegion& compiled,
                                      const std::vector<TensorShape>& inputs,
                                      const std::vector<const Tensor*>& variables,
                                      RegionSteps* steps) {
  return Inference(compiled, variables, steps).Run(inputs);
}

}  // namespace tfmem
