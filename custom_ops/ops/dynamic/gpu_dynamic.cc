// TfmemDynamic and TfmemDynamicStep on a GPU, on the stream that the caller gives.

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/dynamic/gpu_run.h"
#include "custom_ops/ops/fusion/host_variables.h"
#include "custom_ops/ops/sizes.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {

using ::tensorflow::OpInputList;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

namespace {

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
  TFMEM_ASSIGN_OR_RETURN(const std::vector<Tensor*> outputs,
                         AllocateRows(ctx, "outputs", batch.nodes, widths));
  for (const Tensor* output : outputs) arguments->outputs.push_back(output->data());
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
  TFMEM_RETURN_IF_ERROR(made->mode_.Read(ctx));
  TFMEM_ASSIGN_OR_RETURN(made->net_, GpuNet::Create(ctx, made->mode_.spec));
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
  TFMEM_ASSIGN_OR_RETURN(const DynamicBatch batch, ReadBatch(ctx, mode_.spec));
  TFMEM_ASSIGN_OR_RETURN(const DynamicLayout layout, DynamicLayout::Of(mode_.spec, batch));
  const std::vector<LookedUp> looked_up = FindLookedUp(mode_.spec, batch);
  GpuArguments arguments;
  arguments.call = {mode_.forward, mode_.backward, mode_.state_type};
  TFMEM_RETURN_IF_ERROR(Inputs(ctx, batch, &arguments));
  TFMEM_ASSIGN_OR_RETURN(const GpuSent sent,
                         net_->Script(batch, layout, looked_up, arguments.call));
  Tensor memory;
  TFMEM_RETURN_IF_ERROR(AllocateMemory(ctx, batch, sent, &memory));
  if (!mode_.forward) {
    OpInputList kept;
    TFMEM_RETURN_IF_ERROR(ctx->input_list("kept", &kept));
    TFMEM_RETURN_IF_ERROR(CheckKept(kept[0].shape(), memory.shape()));
    TFMEM_RETURN_IF_ERROR(
        CopyOnDevice(stream, memory.data(), kept[0].data(), kept[0].TotalBytes()));
  }
  GradientOutputs gradients;
  if (mode_.backward) {
    TFMEM_ASSIGN_OR_RETURN(gradients, AllocateGradients(ctx, mode_.spec, looked_up));
    for (const Tensor* gradient : gradients.gradients) {
      arguments.first.push_back(gradient->data());
    }
  }
  TFMEM_RETURN_IF_ERROR(Results(ctx, batch, &arguments));
  TFMEM_RETURN_IF_ERROR(PutKept(ctx, mode_.keeps, memory));
  return net_->Launch(ctx, stream, sent, arguments, memory.data(), gradients.rows);
}

absl::Status GpuDynamic::Inputs(OpKernelContext* ctx, const DynamicBatch& batch,
                                GpuArguments* arguments) const {
  OpInputList state_gradients;
  TFMEM_ASSIGN_OR_RETURN(arguments->parameters, ReadParameters(ctx, mode_.spec, batch));
  TFMEM_ASSIGN_OR_RETURN(arguments->seed, ReadSeed(ctx));
  TFMEM_RETURN_IF_ERROR(LossGradients(ctx, batch, arguments));
  TFMEM_RETURN_IF_ERROR(ctx->input_list("state_gradients", &state_gradients));
  TFMEM_RETURN_IF_ERROR(CheckStateGradients(state_gradients, mode_.spec, mode_.state_type, batch));
  if (state_gradients.size() > 0) arguments->gradient_type = mode_.state_type;
  for (const Tensor& gradient : state_gradients) {
    arguments->state_gradients.push_back(gradient.data());
  }
  return absl::OkStatus();
}

absl::Status GpuDynamic::Results(OpKernelContext* ctx, const DynamicBatch& batch,
                                 GpuArguments* arguments) const {
  if (!mode_.forward) return PutNothing(ctx, mode_.widths);
  TFMEM_RETURN_IF_ERROR(PutLists(ctx, batch, mode_.widths, arguments));
  TFMEM_ASSIGN_OR_RETURN(const std::vector<Tensor*> states, AllocateStates(ctx, mode_, batch));
  for (const Tensor* state : states) arguments->states.push_back(state->data());
  return absl::OkStatus();
}

// ---- TfmemDynamicStep

absl::StatusOr<std::unique_ptr<GpuDynamicStep>> GpuDynamicStep::Create(OpKernelConstruction* ctx) {
  auto made = std::make_unique<GpuDynamicStep>();
  TFMEM_RETURN_IF_ERROR(made->update_.Read(ctx));
  TFMEM_ASSIGN_OR_RETURN(made->net_, GpuNet::Create(ctx, made->update_.spec));
  return made;
}

absl::Status GpuDynamicStep::Run(OpKernelContext* ctx, cuda::Stream stream) {
  TFMEM_ASSIGN_OR_RETURN(GpuLink * link, GpuLink::For(stream));
  const absl::Status fits = net_->Fits(link);
  if (absl::IsFailedPrecondition(fits)) {
    return RunOnHost(&host_, ctx, link, stream, {0, update_.uses}, fits);
  }
  TFMEM_RETURN_IF_ERROR(fits);
  const DynamicSpec& spec = update_.spec;
  TFMEM_ASSIGN_OR_RETURN(const DynamicBatch batch, ReadBatch(ctx, spec));
  TFMEM_ASSIGN_OR_RETURN(const DynamicLayout layout, DynamicLayout::Of(spec, batch));
  const std::vector<LookedUp> looked_up = FindLookedUp(spec, batch);
  GpuArguments arguments;
  arguments.call = {true, true, -1, true};
  arguments.rule = update_.rule;
  TFMEM_ASSIGN_OR_RETURN(arguments.rates, ReadRates<float>(ctx, update_.rule));
  TFMEM_ASSIGN_OR_RETURN(arguments.seed, ReadSeed(ctx));
  TFMEM_RETURN_IF_ERROR(LossGradients(ctx, batch, &arguments));
  TFMEM_ASSIGN_OR_RETURN(const GpuSent sent,
                         net_->Script(batch, layout, looked_up, arguments.call));
  Tensor memory;
  TFMEM_RETURN_IF_ERROR(AllocateMemory(ctx, batch, sent, &memory));
  TFMEM_RETURN_IF_ERROR(PutLists(ctx, batch, update_.widths, &arguments));

  const CopyBytes copy = [stream](void* to, const void* from, int64_t bytes) {
    return CopyOnDevice(stream, to, from, bytes);
  };
  RegionVariables variables(ctx, 0, update_.uses, copy);
  TFMEM_RETURN_IF_ERROR(variables.Open());
  TFMEM_RETURN_IF_ERROR(variables.CheckDistinct());
  TFMEM_ASSIGN_OR_RETURN(const std::vector<void*> memories,
                         WritableVariables(ctx, update_, batch, copy, &variables));
  const size_t count = spec.parameters.size();
  for (size_t i = 0; i < memories.size(); ++i) {
    auto& pointers = i < count       ? arguments.parameters
                     : i < 2 * count ? arguments.first
                                     : arguments.second;
    pointers.push_back(memories[i]);
  }
  TFMEM_RETURN_IF_ERROR(net_->Launch(ctx, stream, sent, arguments, memory.data(), {}));
  return PutNumber(ctx);
}

}  // namespace tfmem
