// The ops' interfaces; the kernels are in memops_cpu.cc, memops_gpu.cc and probe_ops.cc.
//
// All are stateful: none may be pruned, folded or merged with another, whatever its outputs are
// used for.
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "custom_ops/ops/memory/tensor_layout.h"
#include "custom_ops/ops/sizes.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/types.h"

namespace tfmem {
namespace {

using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

absl::Status CheckHandle(InferenceContext* c, int input) {
  ShapeHandle unused;
  return c->WithRank(c->input(input), 0, &unused);
}

absl::Status OffloadShape(InferenceContext* c) {
  c->set_output(0, c->Scalar());
  return CheckMovableType(c);
}

absl::Status ReleaseShape(InferenceContext* c) {
  absl::Status status = CheckMovableType(c);
  return status.ok() ? CheckHandle(c, 1) : status;
}

absl::Status PrefetchShape(InferenceContext* c) {
  tensorflow::PartialTensorShape shape;
  ShapeHandle output;
  absl::Status status = CheckMovableType(c);
  if (status.ok()) status = CheckHandle(c, 0);
  if (status.ok()) status = ReadShape(c, &shape);
  if (status.ok()) status = c->MakeShapeFromPartialTensorShape(shape, &output);
  if (status.ok()) c->set_output(0, output);
  return status;
}

absl::Status AwaitShape(InferenceContext* c) {
  absl::Status status = CheckMovableType(c);
  if (status.ok()) status = CheckHandle(c, 1);
  if (status.ok()) c->set_output(0, c->input(0));
  return status;
}

// Sizes in bytes of what an op allocates.
absl::Status CheckBytes(const std::vector<int64_t>& sizes) {
  for (int64_t size : sizes) {
    tensorflow::TensorShape shape;
    TFMEM_RETURN_IF_ERROR(BuildShape({size}, &shape));
  }
  return absl::OkStatus();
}

absl::Status ReserveShape(InferenceContext* c) {
  std::vector<int64_t> sizes;
  absl::Status status = c->GetAttr("sizes", &sizes);
  if (status.ok()) status = CheckBytes(sizes);
  for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->Vector(1));
  return status;
}

absl::Status FillShape(InferenceContext* c) {
  int64_t bytes = 0;
  absl::Status status = c->GetAttr("bytes", &bytes);
  if (status.ok()) status = CheckBytes({bytes});
  if (status.ok()) c->set_output(0, c->Vector(bytes));
  return status;
}

REGISTER_OP("MemOpOffload")
    .Input("tensor: T")
    .Output("handle: variant")
    .Attr("T: type")
    .Attr("mechanism: {'auto', 'copy', 'managed', 'file'} = 'auto'")
    .Attr("label: string = ''")
    .Attr("spill_key: string = ''")
    .Attr("spill_budget: int >= 0 = 0")
    .Attr("host_budget: int >= 0 = 0")
    .SetIsStateful()
    .SetShapeFn(OffloadShape)
    .Doc(R"doc(
Starts moving a tensor out of device memory; waits for nothing.

The tensor must not change before MemOpRelease.

handle: names the tensor in this step.
mechanism: "copy" (GPU: to pinned host memory), "managed" (GPU: migrates the pages of unified
  memory), "file" (CPU: to an unlinked file), or "auto": "copy" on a GPU, "file" on the CPU.
label: the tensor's name, for messages.
spill_key: where "file" puts its files: a key that this process gave out for a directory. The
  system's temporary directory if it is empty, or another process's.
spill_budget: bytes that all spill files of the process may take; 0: no limit.
host_budget: bytes of pinned memory that the process may take; 0: no limit.
)doc");

REGISTER_OP("MemOpRelease")
    .Input("tensor: T")
    .Input("handle: variant")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(ReleaseShape)
    .Doc(R"doc(
Waits until an offloaded tensor is out, so that its memory can be used again.

On a GPU, only the stream waits: memory that is freed after this op was enqueued is safe to reuse.

tensor: the tensor that was offloaded; the op is the last to use it.
)doc");

REGISTER_OP("MemOpPrefetch")
    .Input("handle: variant")
    .Output("tensor: T")
    .Attr("T: type")
    .Attr("shape: shape = {unknown_rank: true}")
    .SetIsStateful()
    .SetShapeFn(PrefetchShape)
    .Doc(R"doc(
Allocates device memory and starts moving an offloaded tensor back; waits for nothing.

tensor: only MemOpAwait may use it.
shape: what is known of the tensor's shape.
)doc");

REGISTER_OP("MemOpAwait")
    .Input("tensor: T")
    .Input("handle: variant")
    .Output("output: T")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(AwaitShape)
    .Doc(R"doc(
Waits until a prefetched tensor is there. On a GPU, only the stream waits.

output: the same memory as `tensor`.
)doc");

REGISTER_OP("MemOpProbe")
    .Attr("run: int")
    .Attr("index: int")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Records time and memory at a point of a step.

The row holds the host's time, the device's time (on a GPU), the bytes the device's allocator has
in use, and the most it had in use since the probe before: the allocator's peak is reset.

run: the table.
index: the row; a later step overwrites it.
)doc");

REGISTER_OP("MemOpStats")
    .Output("stats: int64")
    .Attr("reset: bool = false")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(3));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reads the statistics of the device's allocator.

stats: bytes in use, peak of the bytes in use, bytes the allocator may take; -1: not known.
reset: makes the bytes in use the new peak, after reading.
)doc");

REGISTER_OP("MemOpChunks")
    .Output("chunks: int64")
    .Output("growth: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Matrix(InferenceContext::kUnknownDim, 3));
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Lists the chunks of the device's allocator.

chunks: of each, by address: how far behind the first chunk, bytes, 1 if it is in use or 0; no rows
  if the allocator is not TensorFlow's own for GPUs.
growth: bytes that it may take of the device beyond its chunks, and that are free there.
)doc");

REGISTER_OP("MemOpSharing")
    .Input("tensors: T")
    .Output("first: int64")
    .Attr("T: list(type) >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(c->num_inputs()));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Tells which tensors share memory, and nothing of where it is.

first: of each tensor, the first one whose elements begin where its own do.
)doc");

REGISTER_OP("MemOpReserve")
    .Output("guards: count * uint8")
    .Attr("sizes: list(int)")
    .Attr("count: int >= 1")
    .SetIsStateful()
    .SetShapeFn(ReserveShape)
    .Doc(R"doc(
Leaves free chunks of these sizes in the device's memory, as long as the outputs live.

An allocator that takes the smallest chunk that fits puts small tensors there, and not into the
middle of what large ones need.

guards: an allocation behind each chunk, so that neighbours are not joined.
sizes: bytes of each chunk.
count: how many sizes there are.
)doc");

REGISTER_OP("MemOpFill")
    .Output("filling: uint8")
    .Attr("bytes: int >= 1")
    .SetIsStateful()
    .SetShapeFn(FillShape)
    .Doc(R"doc(
Takes memory, so that what is allocated meanwhile goes elsewhere.

filling: nothing is written to it.
bytes: how many.
)doc");

REGISTER_OP("MemOpPreaccess")
    .Attr("bytes: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Makes the unified memory resident that the next op's output of this size will get.

Allocates, asks the driver to migrate the block's pages to the GPU, and frees: the allocator hands
the same block to the next allocation of that size.
)doc");

}  // namespace
}  // namespace tfmem
