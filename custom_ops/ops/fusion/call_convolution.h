// A region's call of a convolution of images, or of one of its gradients, as cuDNN computes it.
#pragma once

#include <array>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "custom_ops/ops/cuda/gpu_convolution.h"
#include "custom_ops/ops/cuda/gpu_product.h"
#include "custom_ops/ops/fusion/region_shapes.h"

namespace tfmem {

absl::StatusOr<cudnn::Type> CudnnTypeOf(ValueDType dtype);

// Reads an attribute's values for height and width; its values for the other dimensions have to be
// 1. `first` is the place of the height: 1 in [n, h, w, c], 2 in [n, c, h, w].
absl::Status ReadSpatial(const tensorflow::NodeDef& node, const char* name, int first,
                         std::array<int64_t, 2>* found);

// InvalidArgument if a size is larger than cuDNN's integers; Unimplemented if a tensor is.
absl::Status CheckImages(const std::string& op,
                         std::initializer_list<const tensorflow::TensorShape*> shapes);

bool IsConvolution(const std::string& op);

// The convolution that a call is; `values` are the shapes of all values. Unimplemented if it is
// none that cuDNN computes; InvalidArgument if its shapes do not fit.
absl::StatusOr<ConvolutionForm> ConvolutionOf(const CompiledRegion& compiled, int step, bool tf32,
                                              const std::vector<tensorflow::TensorShape>& values);

// A convolution of single pixels, channels last, is a product: of x and w, y and w transposed, or
// x transposed and y. None if it is more.
std::optional<ProductForm> ProductOf(const ConvolutionForm& form);

}  // namespace tfmem
