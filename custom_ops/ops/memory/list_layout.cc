#include "custom_ops/ops/memory/list_layout.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/common_runtime/dma_helper.h"

namespace tfmem {
namespace {

using ::tensorflow::DMAHelper;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorBuffer;
using ::tensorflow::TensorList;
using ::tensorflow::Variant;

absl::Status ReadLists(OpKernelContext* ctx, std::vector<const TensorList*>* lists) {
  tensorflow::OpInputList inputs;
  TFMEM_RETURN_IF_ERROR(ctx->input_list("lists", &inputs));
  for (const Tensor& input : inputs) {
    const TensorList* list =
        input.NumElements() == 1 ? input.flat<Variant>()(0).get<TensorList>() : nullptr;
    if (list == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(ctx->op_kernel().type_string(), " '",
                                                     ctx->op_kernel().name(), "' got ",
                                                     input.SummarizeValue(1), ", expected a list"));
    }
    lists->push_back(list);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ListLayout::Read(OpKernelContext* ctx, std::vector<Tensor>* moving) {
  std::vector<const TensorList*> lists;
  TFMEM_RETURN_IF_ERROR(ReadLists(ctx, &lists));
  std::map<const TensorBuffer*, int64_t> held;  // how many elements hold each buffer
  for (const TensorList* list : lists) {
    for (const Tensor& tensor : list->tensors()) {
      if (const TensorBuffer* buffer = DMAHelper::buffer(&tensor)) ++held[buffer];
    }
  }
  std::map<const TensorBuffer*, int64_t> places;
  for (const TensorList* list : lists) {
    List& read = lists_.emplace_back();
    read.empty.element_shape = list->element_shape;
    read.empty.element_dtype = list->element_dtype;
    read.empty.max_num_elements = list->max_num_elements;
    for (const Tensor& tensor : list->tensors()) {
      Element& element = read.elements.emplace_back();
      const TensorBuffer* buffer = DMAHelper::buffer(&tensor);
      const auto known = places.find(buffer);
      // What moves is held by `moving` as well from then on, so its count is asked for once.
      const bool moves = known != places.end()
                             ? moved_[known->second].dtype == tensor.dtype()
                             : buffer != nullptr && DataTypeCanUseMemcpy(tensor.dtype()) &&
                                   buffer->RefCount() == held[buffer];
      if (!moves) {
        element.kept = tensor;
        continue;
      }
      element.shape = tensor.shape();
      element.moved = known != places.end() ? known->second : static_cast<int64_t>(moved_.size());
      if (known != places.end()) continue;
      places[buffer] = element.moved;
      moved_.push_back({tensor.dtype(), tensor.shape()});
      moving->push_back(tensor);
    }
  }
  return absl::OkStatus();
}

absl::Status ListLayout::Write(OpKernelContext* ctx, const std::vector<Tensor>& arrived) const {
  if (ctx->num_outputs() != static_cast<int>(lists_.size())) {
    return absl::InvalidArgumentError(absl::StrCat(lists_.size(), " lists were offloaded, but ",
                                                   ctx->num_outputs(), " are prefetched"));
  }
  for (int place = 0; place < ctx->num_outputs(); ++place) {
    const List& read = lists_[place];
    TensorList list = read.empty.Copy();
    for (const Element& element : read.elements) {
      Tensor& tensor = list.tensors().emplace_back();
      if (element.moved == kKept) {
        tensor = element.kept;
      } else if (!tensor.CopyFrom(arrived[element.moved], element.shape)) {
        return absl::InternalError("an element of a list came back with another size");
      }
    }
    tensorflow::AllocatorAttributes host;
    host.set_on_host(true);
    Tensor* output = nullptr;
    TFMEM_RETURN_IF_ERROR(ctx->allocate_output(place, {}, &output, host));
    output->scalar<Variant>()() = std::move(list);
  }
  return absl::OkStatus();
}

absl::Status ListLayout::Find(OpKernelContext* ctx, std::vector<const void*>* where) const {
  std::vector<const TensorList*> lists;
  TFMEM_RETURN_IF_ERROR(ReadLists(ctx, &lists));
  where->assign(moved_.size(), nullptr);
  for (size_t place = 0; place < lists.size() && place < lists_.size(); ++place) {
    const std::vector<Element>& elements = lists_[place].elements;
    const std::vector<Tensor>& tensors = lists[place]->tensors();
    for (size_t index = 0; index < elements.size() && index < tensors.size(); ++index) {
      const int64_t moved = elements[index].moved;
      if (moved != kKept) (*where)[moved] = tensors[index].data();
    }
  }
  return absl::OkStatus();
}

}  // namespace tfmem
