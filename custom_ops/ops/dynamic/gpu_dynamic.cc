// TfmemDynamic and TfmemDynamicStep on a GPU, on the stream that the caller gives.
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/dynamic/gpu_run.h"
#include "custom_ops/ops/fusion/host_variables.h"
#include "custom_ops/ops/sizes.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {

using ::tensorflow::OpInputList;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::OpOutputList;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

namespace {

absl::Status ReadSeed(OpKernelContext* ctx, uint64_t* seed) {
  const Tensor* given = nullptr;
  TFMEM_RETURN_IF_ERROR(ctx->input("seed", &given));
  if (given->NumElements() != 1) return absl::InvalidArgumentError("expected one seed");
  *seed = given->flat<int64_t>()(0);
  return absl::OkStatus();
}

// For all values of a batch.
absl::Status AllocateMemory(OpKernelContext* ctx, const DynamicBatch& batch, const GpuSent& sent,
                            Tensor* memory) {
  TensorShape shape;
  TFMEM_RETURN_IF_ERROR(BuildShape({sent.floats}, &shape));
  const absl::Status done = ctx->allocate_temp(tensorflow::DT_FLOAT, shape, memory);
  if (!absl::IsResourceExhausted(done)) return done;
  return absl::ResourceExhaustedError(
      absl::StrCat("a batch of ", batch.examples, " examples and ", batch.nodes, " nodes needs ",
                   sent.floats * sizeof(float),
                   " bytes of device memory for its values; no parameter was written: give smaller "
                   "batches (",
                   done.message(), ")"));
}

absl::Status PutLists(OpKernelContext* ctx, const DynamicBatch& batch,
                      const std::vector<int64_t>& widths, GpuArguments* arguments) {
  Tensor* losses = nullptr;
  TFMEM_RETURN_IF_ERROR(ctx->allocate_output("losses", TensorShape({batch.examples}), &losses));
  arguments->losses = losses->data();
  OpOutputList outputs;
  TFMEM_RETURN_IF_ERROR(ctx->output_list("outputs", &outputs));
  for (size_t i = 0; i < widths.size(); ++i) {
    Tensor* output = nullptr;
    TensorShape shape;
    TFMEM_RETURN_IF_ERROR(BuildShape({batch.nodes, widths[i]}, &shape));
    TFMEM_RETURN_IF_ERROR(outputs.allocate(i, shape, &output));
    arguments->outputs.push_back(output->data());
  }
  return absl::OkStatus();
}

absl::Status LossGradients(OpKernelContext* ctx, const DynamicBatch& batch,
                           GpuArguments* arguments) {
  OpInputList list;
  TFMEM_RETURN_IF_ERROR(ctx->input_list("loss_gradients", &list));
  TFMEM_RETURN_IF_ERROR(CheckLossGradients(list, batch));
  if (list.size() > 0) arguments->loss_gradients = list[0].data();
  return absl::OkStatus();
}

}  // namespace

// ---- TfmemDynamic

absl::StatusOr<std::unique_ptr<GpuDynamic>> GpuDynamic::Create(OpKernelConstruction* ctx) {
  auto made = std::make_unique<GpuDynamic>();
  TFMEM_ASSIGN_OR_RETURN(made->spec_, ReadDynamicSpec(ctx));
  TFMEM_ASSIGN_OR_RETURN(made->widths_, OutputWidths(made->spec_));
  std::string mode;
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("mode", &mode));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("state_type", &made->state_type_));
  made->forward_ = mode != "backward";
  made->backward_ = mode == "backward" || mode == "forward_backward";
  made->keeps_ = mode == "training";
  TFMEM_RETURN_IF_ERROR(
      CheckLists(ctx, made->spec_, made->state_type_, made->forward_, made->backward_));
  TFMEM_ASSIGN_OR_RETURN(made->net_, GpuNet::Create(ctx, made->spec_));
  return made;
}

absl::Status GpuDynamic::Run(OpKernelContext* ctx, cuda::Stream stream) {
  TFMEM_ASSIGN_OR_RETURN(GpuLink * link, GpuLink::For(stream));
  const absl::Status fits = net_->Fits(link);
  if (absl::IsFailedPrecondition(fits)) {
    HostCopies copies(ctx, link, stream);
    return host_.Run(ctx, &copies, fits);
  }
  TFMEM_RETURN_IF_ERROR(fits);
  TFMEM_ASSIGN_OR_RETURN(const DynamicBatch batch, ReadBatch(ctx, spec_));
  TFMEM_ASSIGN_OR_RETURN(const DynamicLayout layout, DynamicLayout::Of(spec_, batch));
  const std::vector<LookedUp> looked_up = FindLookedUp(spec_, batch);
  GpuArguments arguments;
  arguments.call = {forward_, backward_, state_type_};
  TFMEM_RETURN_IF_ERROR(Inputs(ctx, batch, &arguments));
  TFMEM_ASSIGN_OR_RETURN(const GpuSent sent,
                         net_->Script(batch, layout, looked_up, arguments.call));
  Tensor memory;
  TFMEM_RETURN_IF_ERROR(AllocateMemory(ctx, batch, sent, &memory));
  if (!forward_) {
    OpInputList kept;
    TFMEM_RETURN_IF_ERROR(ctx->input_list("kept", &kept));
    TFMEM_RETURN_IF_ERROR(CheckKept(kept[0].shape(), memory.shape()));
    TFMEM_RETURN_IF_ERROR(
        CopyOnDevice(stream, memory.data(), kept[0].data(), kept[0].TotalBytes()));
  }
  std::vector<Tensor*> rows;
  if (backward_) TFMEM_RETURN_IF_ERROR(Gradients(ctx, looked_up, &arguments, &rows));
  TFMEM_RETURN_IF_ERROR(Results(ctx, batch, &arguments));
  if (keeps_) {
    TFMEM_RETURN_IF_ERROR(ctx->set_output("keep", memory));
  } else {
    Tensor* keep = nullptr;
    TFMEM_RETURN_IF_ERROR(ctx->allocate_output("keep", TensorShape({0}), &keep));
  }
  return net_->Launch(ctx, stream, sent, arguments, memory.data(), rows);
}

absl::Status GpuDynamic::Inputs(OpKernelContext* ctx, const DynamicBatch& batch,
                                GpuArguments* arguments) const {
  OpInputList parameters, state_gradients;
  TFMEM_RETURN_IF_ERROR(ctx->input_list("parameters", &parameters));
  for (int i = 0; i < parameters.size(); ++i) {
    TFMEM_RETURN_IF_ERROR(CheckParameter(spec_, i, batch, parameters[i].shape()));
    arguments->parameters.push_back(parameters[i].data());
  }
  TFMEM_RETURN_IF_ERROR(ReadSeed(ctx, &arguments->seed));
  TFMEM_RETURN_IF_ERROR(LossGradients(ctx, batch, arguments));
  TFMEM_RETURN_IF_ERROR(ctx->input_list("state_gradients", &state_gradients));
  TFMEM_RETURN_IF_ERROR(CheckStateGradients(state_gradients, spec_, state_type_, batch));
  if (state_gradients.size() > 0) arguments->gradient_type = state_type_;
  for (const Tensor& gradient : state_gradients) {
    arguments->state_gradients.push_back(gradient.data());
  }
  return absl::OkStatus();
}

absl::Status GpuDynamic::Gradients(OpKernelContext* ctx, const std::vector<LookedUp>& looked_up,
                                   GpuArguments* arguments, std::vector<Tensor*>* rows) const {
  OpOutputList dense, row_lists, row_gradients;
  TFMEM_RETURN_IF_ERROR(ctx->output_list("gradients", &dense));
  TFMEM_RETURN_IF_ERROR(ctx->output_list("rows", &row_lists));
  TFMEM_RETURN_IF_ERROR(ctx->output_list("row_gradients", &row_gradients));
  int next_dense = 0, next_sparse = 0;
  for (size_t i = 0; i < spec_.parameters.size(); ++i) {
    const DynamicParameter& parameter = spec_.parameters[i];
    Tensor* gradient = nullptr;
    if (parameter.sparse) {
      const int64_t count = looked_up[i].rows();
      Tensor* of_table = nullptr;
      TFMEM_RETURN_IF_ERROR(row_lists.allocate(next_sparse, TensorShape({count}), &of_table));
      rows->push_back(of_table);
      TFMEM_RETURN_IF_ERROR(row_gradients.allocate(
          next_sparse++, TensorShape({count, parameter.columns}), &gradient));
    } else {
      const TensorShape shape = parameter.matrix ? TensorShape({parameter.rows, parameter.columns})
                                                 : TensorShape({parameter.columns});
      TFMEM_RETURN_IF_ERROR(dense.allocate(next_dense++, shape, &gradient));
    }
    arguments->first.push_back(gradient->data());
  }
  return absl::OkStatus();
}

absl::Status GpuDynamic::Results(OpKernelContext* ctx, const DynamicBatch& batch,
                                 GpuArguments* arguments) const {
  if (!forward_) return PutNothing(ctx, widths_);
  TFMEM_RETURN_IF_ERROR(PutLists(ctx, batch, widths_, arguments));
  OpOutputList states;
  TFMEM_RETURN_IF_ERROR(ctx->output_list("states", &states));
  for (int i = 0; i < states.size(); ++i) {
    Tensor* state = nullptr;
    TensorShape shape;
    TFMEM_RETURN_IF_ERROR(BuildShape({batch.nodes, spec_.types[state_type_][i]}, &shape));
    TFMEM_RETURN_IF_ERROR(states.allocate(i, shape, &state));
    arguments->states.push_back(state->data());
  }
  return absl::OkStatus();
}

// ---- TfmemDynamicStep

absl::StatusOr<std::unique_ptr<GpuDynamicStep>> GpuDynamicStep::Create(OpKernelConstruction* ctx) {
  auto made = std::make_unique<GpuDynamicStep>();
  TFMEM_ASSIGN_OR_RETURN(made->spec_, ReadDynamicSpec(ctx));
  TFMEM_ASSIGN_OR_RETURN(made->widths_, OutputWidths(made->spec_));
  std::string rule;
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("rule", &rule));
  made->rule_ = rule == "sgd" ? kSgd : rule == "momentum" ? kMomentum : kAdam;
  int64_t variables = 0;
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("Nv", &variables));
  const int64_t expected = made->spec_.parameters.size() * made->rule_;
  if (variables != expected) {
    return absl::InvalidArgumentError(
        absl::StrCat("the op has ", variables, " variables; rule '", rule, "' takes ", expected));
  }
  VariableUse use;
  use.read = use.assigned = true;
  made->uses_.assign(variables, use);
  TFMEM_ASSIGN_OR_RETURN(made->net_, GpuNet::Create(ctx, made->spec_));
  return made;
}

absl::Status GpuDynamicStep::Run(OpKernelContext* ctx, cuda::Stream stream) {
  TFMEM_ASSIGN_OR_RETURN(GpuLink * link, GpuLink::For(stream));
  const absl::Status fits = net_->Fits(link);
  if (absl::IsFailedPrecondition(fits)) {
    return RunOnHost(&host_, ctx, link, stream, {0, uses_}, fits);
  }
  TFMEM_RETURN_IF_ERROR(fits);
  TFMEM_ASSIGN_OR_RETURN(const DynamicBatch batch, ReadBatch(ctx, spec_));
  TFMEM_ASSIGN_OR_RETURN(const DynamicLayout layout, DynamicLayout::Of(spec_, batch));
  const std::vector<LookedUp> looked_up = FindLookedUp(spec_, batch);
  GpuArguments arguments;
  arguments.call = {true, true, -1, true};
  arguments.rule = rule_;
  const Tensor* rates = nullptr;
  TFMEM_RETURN_IF_ERROR(ctx->input("rates", &rates));
  const int64_t wanted = rule_ == kSgd ? 1 : rule_ == kMomentum ? 2 : 5;
  if (rates->NumElements() != wanted) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rates have shape ", rates->shape().DebugString(), "; the rule takes ", wanted));
  }
  const float* rate = rates->flat<float>().data();
  arguments.rates[0] = rate[0];
  if (rule_ == kMomentum) arguments.rates[1] = rate[1];
  if (rule_ == kAdam) {
    const double first = 1 - std::pow(double{rate[1]}, double{rate[4]});
    const double second = 1 - std::pow(double{rate[2]}, double{rate[4]});
    arguments.rates[0] = static_cast<float>(rate[0] * std::sqrt(second) / first);
    arguments.rates[1] = 1 - rate[1];
    arguments.rates[2] = 1 - rate[2];
    arguments.rates[3] = rate[3];
  }
  TFMEM_RETURN_IF_ERROR(ReadSeed(ctx, &arguments.seed));
  TFMEM_RETURN_IF_ERROR(LossGradients(ctx, batch, &arguments));
  TFMEM_ASSIGN_OR_RETURN(const GpuSent sent,
                         net_->Script(batch, layout, looked_up, arguments.call));
  Tensor memory;
  TFMEM_RETURN_IF_ERROR(AllocateMemory(ctx, batch, sent, &memory));
  TFMEM_RETURN_IF_ERROR(PutLists(ctx, batch, widths_, &arguments));

  const CopyBytes copy = [stream](void* to, const void* from, int64_t bytes) {
    return CopyOnDevice(stream, to, from, bytes);
  };
  RegionVariables variables(ctx, 0, uses_, copy);
  TFMEM_RETURN_IF_ERROR(variables.Open());
  TFMEM_RETURN_IF_ERROR(variables.CheckDistinct());
  const int count = spec_.parameters.size(), all = uses_.size();
  for (int i = 0; i < all; ++i) {
    if (i >= count && !spec_.parameters[i % count].trained) continue;  // never touched
    TFMEM_RETURN_IF_ERROR(CheckParameter(spec_, i % count, batch, variables.Now(i)->shape()));
  }
  for (int i = 0; i < all; ++i) {
    if (!variables.MayWrite(i)) {
      const Tensor& now = *variables.Now(i);
      Tensor own;
      TFMEM_RETURN_IF_ERROR(ctx->allocate_temp(now.dtype(), now.shape(), &own));
      TFMEM_RETURN_IF_ERROR(copy(own.data(), now.data(), now.TotalBytes()));
      TFMEM_RETURN_IF_ERROR(variables.Assign(i, std::move(own)));
    }
    auto& pointers = i < count       ? arguments.parameters
                     : i < 2 * count ? arguments.first
                                     : arguments.second;
    pointers.push_back(variables.Now(i)->data());
  }
  TFMEM_RETURN_IF_ERROR(net_->Launch(ctx, stream, sent, arguments, memory.data(), {}));
  return PutNumber(ctx);
}

}  // namespace tfmem
