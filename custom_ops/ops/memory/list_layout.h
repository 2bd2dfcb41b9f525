// What is in lists of tensors that move as one: which of their elements leave memory, and where
// each one is put back.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/kernels/tensor_list.h"

namespace tfmem {

class ListLayout {
 public:
  // The ops say nothing of lists in their attributes.
  struct Attributes {
    absl::Status Read(tensorflow::OpKernelConstruction*) { return absl::OkStatus(); }
    absl::Status CheckPrefetch(const ListLayout&, const std::string&) const {
      return absl::OkStatus();
    }
  };

  // Reads input "lists". Only tensors of fixed-size types that nothing but these lists holds move:
  // the memory of all others would stay in use. These are put into `moving`.
  absl::Status Read(tensorflow::OpKernelContext* ctx, std::vector<tensorflow::Tensor>* moving);

  size_t size() const { return moved_.size(); }  // tensors that moved
  // Memory for one of them, by its position in `moving`.
  absl::Status Allocate(tensorflow::OpKernelContext* ctx, size_t place,
                        tensorflow::Tensor* tensor) const {
    return ctx->allocate_temp(moved_[place].dtype, moved_[place].shape, tensor);
  }

  // Writes output "lists", with `arrived` in place of what moved.
  absl::Status Write(tensorflow::OpKernelContext* ctx,
                     const std::vector<tensorflow::Tensor>& arrived) const;

  // Where the tensors that moved are in input "lists", which `Write` made.
  absl::Status Find(tensorflow::OpKernelContext* ctx, std::vector<const void*>* where) const;

 private:
  static constexpr int64_t kKept = -1;

  // A tensor that moves; several elements may be it, perhaps under other shapes.
  struct Moved {
    tensorflow::DataType dtype;
    tensorflow::TensorShape shape;
  };
  struct Element {
    int64_t moved = kKept;  // which of the tensors that moved
    tensorflow::Tensor kept;
    tensorflow::TensorShape shape;
  };
  struct List {
    tensorflow::TensorList empty;
    std::vector<Element> elements;
  };

  std::vector<List> lists_;
  std::vector<Moved> moved_;
};

}  // namespace tfmem
