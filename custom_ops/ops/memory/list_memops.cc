// The interfaces of the MemOps of lists of tensors, which loops fill for their gradients.
#include "absl/status/status.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfmem {
namespace {

using ::tensorflow::shape_inference::InferenceContext;

absl::Status ScalarShapes(InferenceContext* c) {
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->Scalar());
  return absl::OkStatus();
}

REGISTER_OP("MemOpOffloadLists")
    .Input("lists: N * variant")
    .Output("handle: variant")
    .Attr("N: int >= 1")
    .Attr("mechanism: {'auto', 'copy', 'managed', 'file'} = 'auto'")
    .Attr("label: string = ''")
    .Attr("spill_key: string = ''")
    .Attr("spill_budget: int >= 0 = 0")
    .Attr("host_budget: int >= 0 = 0")
    .SetIsStateful()
    .SetShapeFn(ScalarShapes)
    .Doc(R"doc(
Starts moving the tensors of lists out of device memory, as MemOpOffload does of one tensor.

A tensor that several of the lists hold moves once. One that is held elsewhere, too, stays.

lists: of tensors (TensorList); they must not change before MemOpReleaseLists.
)doc");

REGISTER_OP("MemOpReleaseLists")
    .Input("lists: N * variant")
    .Input("handle: variant")
    .Attr("N: int >= 1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Waits until offloaded lists are out, as MemOpRelease does; the op is the last to use them.
)doc");

REGISTER_OP("MemOpPrefetchLists")
    .Input("handle: variant")
    .Output("back: N * variant")
    .Attr("N: int >= 1")
    .SetIsStateful()
    .SetShapeFn(ScalarShapes)
    .Doc(R"doc(
Allocates device memory and starts moving the tensors of lists back, as MemOpPrefetch does.

back: only MemOpAwaitLists may use them.
)doc");

REGISTER_OP("MemOpAwaitLists")
    .Input("lists: N * variant")
    .Input("handle: variant")
    .Output("back: N * variant")
    .Attr("N: int >= 1")
    .SetIsStateful()
    .SetShapeFn(ScalarShapes)
    .Doc(R"doc(
Waits until the tensors of prefetched lists are there, as MemOpAwait does.
)doc");

}  // namespace
}  // namespace tfmem
