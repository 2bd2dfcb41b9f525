// An op on the CPU that reads its programs as the GPU's ops do, and says what it read.
#include <string>
#include <vector>

#include "custom_ops/ops/cuda/image_functions.h"
#include "custom_ops/ops/cuda/kernel_image.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"

namespace tfmem {
namespace {

using ::tensorflow::DEVICE_CPU;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;

REGISTER_OP("TfmemTestImages")
    .Input("x: float")
    .Output("codes: string")
    .Output("places: int64")
    .Attr("programs: list(string) = []")
    .Attr("images: list(func) = []")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnknownShape);

class TestImagesOp : public OpKernel {
 public:
  explicit TestImagesOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    absl::StatusOr<std::vector<ProgramText>> texts = ReadPrograms(ctx);
    OP_REQUIRES_OK(ctx, texts.status());
    for (const ProgramText& text : *texts) {
      absl::StatusOr<KernelHeader> header = KernelHeader::Parse(text.header);
      OP_REQUIRES_OK(ctx, header.status());
      absl::StatusOr<KernelImage> image = ReadImage(&*header, text.code);
      OP_REQUIRES_OK(ctx, image.status());
      images_.push_back(*std::move(image));
    }
  }

  void Compute(OpKernelContext* ctx) override {
    const int64_t count = images_.size();
    Tensor *codes = nullptr, *places = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {count}, &codes));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, {count}, &places));
    for (int64_t i = 0; i < count; ++i) {
      codes->vec<tensorflow::tstring>()(i) = *images_[i].code;
      places->vec<int64_t>()(i) = reinterpret_cast<int64_t>(images_[i].code.get());
    }
  }

 private:
  std::vector<KernelImage> images_;
};

REGISTER_KERNEL_BUILDER(Name("TfmemTestImages").Device(DEVICE_CPU), TestImagesOp);

}  // namespace
}  // namespace tfmem
