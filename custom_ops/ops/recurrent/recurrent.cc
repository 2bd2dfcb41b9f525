// TfmemRecurrent's interface, and the checks that all its kernels need. The kernels are in
// recurrent_cpu.cc and recurrent_gpu.cc.
#include "custom_ops/ops/recurrent/recurrent.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/sizes.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tfmem {
namespace {

using ::tensorflow::OpInputList;
using ::tensorflow::OpKernelContext;
using ::tensorflow::OpOutputList;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using ::tensorflow::shape_inference::DimensionHandle;
using ::tensorflow::shape_inference::InferenceContext;
using ::tensorflow::shape_inference::ShapeHandle;

constexpr int64_t kMostDirections = 64;  // whose ways a word of the kernels' parameter holds

// The shapes of the graph's tensors while it is built.
class ShapeInference {
 public:
  ShapeInference(InferenceContext* c, const RecurrentAttributes& attributes)
      : c_(c),
        units_(attributes.units),
        directions_(attributes.directions),
        batch_major_(attributes.batch_major),
        cell_(attributes.cell),
        time_(c->UnknownDim()),
        batch_(c->UnknownDim()) {}

  absl::Status Run() {
    TFMEM_RETURN_IF_ERROR(Inputs("sequences", cell_.sequences, true, true));
    TFMEM_RETURN_IF_ERROR(Inputs("invariants", cell_.invariants, false, true));
    TFMEM_RETURN_IF_ERROR(Inputs("vectors", cell_.vectors, false, false));
    TFMEM_RETURN_IF_ERROR(Matrices());
    TFMEM_RETURN_IF_ERROR(States());
    std::vector<ShapeHandle> outputs;
    std::vector<ShapeHandle> finals;
    for (int direction = 0; direction < directions_; ++direction) {
      for (size_t i = 0; i < cell_.outputs.size(); ++i) {
        const int64_t columns = cell_.scalar_output(i) ? 0 : cell_.outputs[i].size();
        outputs.push_back(Shape(columns, true, true));
      }
      for (size_t i = 0; i < cell_.states.size(); ++i) finals.push_back(Shape(1, false, true));
    }
    for (ShapeHandle shape : outputs) TFMEM_RETURN_IF_ERROR(CheckElements(shape));
    for (ShapeHandle shape : finals) TFMEM_RETURN_IF_ERROR(CheckElements(shape));
    TFMEM_RETURN_IF_ERROR(c_->set_output("outputs", outputs));
    return c_->set_output("finals", finals);
  }

 private:
  // [time?, batch?, columns * units], without the last if there are no columns.
  ShapeHandle Shape(int64_t columns, bool time, bool batch) {
    std::vector<DimensionHandle> dimensions;
    if (time) dimensions.push_back(time_);
    if (batch) dimensions.push_back(batch_);
    if (time && batch_major_) std::swap(dimensions[0], dimensions[1]);
    if (columns > 0) dimensions.push_back(c_->MakeDim(columns * units_));
    return c_->MakeShape(dimensions);
  }

  absl::Status Inputs(const char* name, const std::vector<int>& columns, bool time, bool batch) {
    std::vector<ShapeHandle> shapes;
    TFMEM_RETURN_IF_ERROR(c_->input(name, &shapes));
    for (size_t i = 0; i < shapes.size(); ++i) {
      const ShapeHandle expected = Shape(columns[i % columns.size()], time, batch);
      TFMEM_ASSIGN_OR_RETURN(ShapeHandle merged, Merge(name, i, shapes[i], expected));
      if (time) time_ = c_->Dim(merged, batch_major_ ? 1 : 0);
      if (batch) batch_ = c_->Dim(merged, time && !batch_major_ ? 1 : 0);
    }
    return absl::OkStatus();
  }

  // One of no rows stands for zeros.
  absl::Status States() {
    std::vector<ShapeHandle> shapes;
    TFMEM_RETURN_IF_ERROR(c_->input("states", &shapes));
    for (size_t i = 0; i < shapes.size(); ++i) {
      const bool empty = c_->RankKnown(shapes[i]) && c_->Rank(shapes[i]) == 2 &&
                         c_->ValueKnown(c_->Dim(shapes[i], 0)) &&
                         c_->Value(c_->Dim(shapes[i], 0)) == 0;
      const ShapeHandle expected =
          empty ? c_->Matrix(0, units_) : c_->Matrix(batch_, c_->MakeDim(units_));
      TFMEM_ASSIGN_OR_RETURN(ShapeHandle merged, Merge("states", i, shapes[i], expected));
      if (!empty) batch_ = c_->Dim(merged, 0);
    }
    return absl::OkStatus();
  }

  absl::Status Matrices() {
    std::vector<ShapeHandle> shapes;
    TFMEM_RETURN_IF_ERROR(c_->input("matrices", &shapes));
    for (size_t i = 0; i < shapes.size(); ++i) {
      const CellMatrix& matrix = cell_.matrices[i % cell_.matrices.size()];
      const ShapeHandle expected = c_->Matrix(matrix.rows * units_, matrix.columns * units_);
      TFMEM_RETURN_IF_ERROR(Merge("matrices", i, shapes[i], expected).status());
    }
    return absl::OkStatus();
  }

  absl::Status CheckElements(ShapeHandle shape) {
    Size elements = 1;
    for (int i = 0; i < c_->Rank(shape); ++i) {
      const DimensionHandle dimension = c_->Dim(shape, i);
      if (c_->ValueKnown(dimension)) elements = elements * c_->Value(dimension);
    }
    if (elements.ok()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("an output would have shape ",
                                                   c_->DebugString(shape),
                                                   ", of more elements than 64 bits count"));
  }

  absl::StatusOr<ShapeHandle> Merge(const char* name, size_t index, ShapeHandle found,
                                    ShapeHandle expected) {
    ShapeHandle merged;
    const absl::Status status = c_->Merge(found, expected, &merged);
    if (status.ok()) return merged;
    return absl::InvalidArgumentError(
        absl::StrCat(name, "[", index, "] with ", units_, " units: ", status.message()));
  }

  InferenceContext* const c_;
  const int64_t units_;
  const int directions_;
  const bool batch_major_;
  const Cell& cell_;
  DimensionHandle time_;
  DimensionHandle batch_;
};

absl::Status RecurrentShape(InferenceContext* c) {
  TFMEM_ASSIGN_OR_RETURN(RecurrentAttributes attributes, ReadRecurrentAttributes(c));
  return ShapeInference(c, attributes).Run();
}

REGISTER_OP("TfmemRecurrent")
    .Input("sequences: Ns * T")   // [time, batch, columns * units] or [time, batch]; or batch, time
    .Input("invariants: Ni * T")  // [batch, columns * units]
    .Input("vectors: Nv * T")     // [columns * units]
    .Input("matrices: Nm * T")    // [rows * units, columns * units]
    .Input("states: Nh * T")      // [batch, units], or [0, units]
    .Output("outputs: No * T")    // as sequences
    .Output("finals: Nh * T")     // [batch, units]
    .Attr("T: {float, half, bfloat16, double}")
    .Attr("Ns: int >= 1")
    .Attr("Ni: int >= 0")
    .Attr("Nv: int >= 0")
    .Attr("Nm: int >= 0")
    .Attr("Nh: int >= 1")
    .Attr("No: int >= 0")
    .Attr("cell: string")
    .Attr("units: int >= 1")
    .Attr("directions: int >= 1 = 1")
    .Attr("reverse: list(bool) = []")
    .Attr("batch_major: bool = false")
    .Attr("precision: {'highest', 'tf32', 'bfloat16', 'float16'} = 'highest'")
    .Attr("programs: list(string) = []")
    .Attr("images: list(func) = []")
    .Attr("base_cell: string = ''")
    .Attr("gradient_programs: list(string) = []")
    .Attr("gradient_images: list(func) = []")
    .Attr("fingerprint: int = 0")
    .SetShapeFn(RecurrentShape)
    .Doc(R"doc(
Runs a recurrent cell over whole sequences.

All lists hold the tensors of direction 0, then those of direction 1, each in the order of the cell.
Sequences in and out keep the same time index, whichever way a direction walks.

sequences: what the cell reads of each step, [time, batch, columns * units] or [time, batch].
invariants: what it reads at every step, [batch, columns * units].
vectors: parameters, [columns * units].
matrices: weights, [rows * units, columns * units].
states: the initial states, [batch, units]; one of shape [0, units] stands for zeros.
outputs: what is kept of each step, [time, batch, columns * units] or [time, batch].
finals: the states after the last step, [batch, units].
cell: Cell.to_text() of custom_ops/recurrent/cell.py.
reverse: for each direction, whether it walks time from last to first; empty: none does.
batch_major: whether sequences and outputs begin with batch and time, in place of time and batch.
precision: how a GPU stores weights and exchanged values; "highest" is as accurate as T.
programs: GPU programs for this cell in ascending order of the largest batch each takes; the first
  may be one that takes none, and stands in where CTAs of the others cannot wait for each other.
base_cell: the cell without the outputs that are saved for the gradient; empty if none are.
images: for each program the function of the graph's library that holds its code, so that code lies
  in a graph once; empty where the programs are of the format before this one and hold it themselves.
gradient_programs: graphs of earlier versions have it, empty; nothing looks at it.
gradient_images: the same.
fingerprint: graphs of the format before this one have it; nothing looks at it.
)doc");

// One list of inputs, split by direction, with its shapes checked.
class InputReader {
 public:
  InputReader(OpKernelContext* ctx, const RecurrentAttributes& attributes, RecurrentCall* call)
      : ctx_(ctx), units_(attributes.units), call_(call) {}

  using Field = std::vector<const void*> RecurrentDirection::*;

  // `leading`: how many of time and batch lead the shape, counted from batch.
  absl::Status Read(const char* name, const std::vector<int>& columns, int leading, Field field) {
    std::vector<TensorShape> expected;
    for (int count : columns) {
      std::vector<int64_t> sizes;
      if (leading > 1) sizes = call_->leading();
      if (leading == 1) sizes = {call_->batch};
      if (count > 0) sizes.push_back(count * units_);
      TFMEM_RETURN_IF_ERROR(BuildShape(sizes, &expected.emplace_back()));
    }
    return Read(name, expected, field);
  }

  absl::Status Read(const char* name, const std::vector<TensorShape>& expected, Field field) {
    OpInputList inputs;
    TFMEM_RETURN_IF_ERROR(ctx_->input_list(name, &inputs));
    for (int i = 0; i < inputs.size(); ++i) {
      const TensorShape& shape = expected[i % expected.size()];
      const bool zeros = field == &RecurrentDirection::initials && NoRows(inputs[i].shape());
      if (!zeros && inputs[i].shape() != shape) {
        return absl::InvalidArgumentError(absl::StrCat(
            name, "[", i, "] of '", ctx_->op_kernel().name(), "' has shape ",
            inputs[i].shape().DebugString(), "; expected ", shape.DebugString(), " (time ",
            call_->time, ", batch ", call_->batch, ", units ", units_, ")"));
      }
      const void* data = zeros ? nullptr : inputs[i].data();
      (call_->directions[i / expected.size()].*field).push_back(data);
    }
    return absl::OkStatus();
  }

 private:
  bool NoRows(const TensorShape& shape) const { return shape == TensorShape({0, units_}); }

  OpKernelContext* const ctx_;
  const int64_t units_;
  RecurrentCall* const call_;
};

// Time and batch, which the first sequence says.
absl::Status ReadSizes(OpKernelContext* ctx, bool batch_major, RecurrentCall* call) {
  OpInputList sequences;
  TFMEM_RETURN_IF_ERROR(ctx->input_list("sequences", &sequences));
  const TensorShape& shape = sequences[0].shape();
  if (shape.dims() < 2) {
    return absl::InvalidArgumentError(absl::StrCat(
        "sequences[0] of '", ctx->op_kernel().name(), "' has shape ", shape.DebugString(),
        "; expected ", batch_major ? "[batch, time" : "[time, batch", ", ...]"));
  }
  call->batch_major = batch_major;
  call->time = shape.dim_size(batch_major ? 1 : 0);
  call->batch = shape.dim_size(batch_major ? 0 : 1);
  if (call->batch == 0) return absl::OkStatus();  // nothing to do, in however many steps
  TFMEM_RETURN_IF_ERROR(CheckRange("the batch of sequences[0]", call->batch, 0, kMostOfASize));
  return CheckRange("the time of sequences[0]", call->time, 0, kMostOfASize);
}

absl::Status AllocateOutputs(OpKernelContext* ctx, const RecurrentAttributes& attributes,
                             RecurrentCall* call) {
  const Cell& cell = attributes.cell;
  OpOutputList outputs;
  OpOutputList finals;
  TensorShape state;
  TFMEM_RETURN_IF_ERROR(BuildShape({call->batch, attributes.units}, &state));
  TFMEM_RETURN_IF_ERROR(ctx->output_list("outputs", &outputs));
  TFMEM_RETURN_IF_ERROR(ctx->output_list("finals", &finals));
  for (int direction = 0; direction < attributes.directions; ++direction) {
    RecurrentDirection& target = call->directions[direction];
    for (size_t i = 0; i < cell.outputs.size(); ++i) {
      std::vector<int64_t> sizes = call->leading();
      if (!cell.scalar_output(i)) {
        const auto columns = static_cast<int64_t>(cell.outputs[i].size());
        sizes.push_back((Size(columns) * attributes.units).value());
      }
      TensorShape shape;
      TFMEM_RETURN_IF_ERROR(BuildShape(sizes, &shape));
      Tensor* output = nullptr;
      TFMEM_RETURN_IF_ERROR(outputs.allocate(direction * cell.outputs.size() + i, shape, &output));
      target.outputs.push_back(output->data());
    }
    for (size_t i = 0; i < cell.states.size(); ++i) {
      Tensor* final = nullptr;
      TFMEM_RETURN_IF_ERROR(finals.allocate(direction * cell.states.size() + i, state, &final));
      target.finals.push_back(final->data());
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<RecurrentAttributes> MakeRecurrentAttributes(const std::string& cell, int64_t units,
                                                            int64_t directions,
                                                            std::vector<bool> reverse,
                                                            bool batch_major,
                                                            const std::vector<int64_t>& counts) {
  TFMEM_RETURN_IF_ERROR(CheckRange("attr units", units, 1, kMostOfASize));
  TFMEM_RETURN_IF_ERROR(CheckRange("attr directions", directions, 1, kMostDirections));
  TFMEM_ASSIGN_OR_RETURN(Cell parsed, ParseCell(cell));
  const struct {
    const char* name;
    size_t count;
  } expected[] = {
      {"Ns", parsed.sequences.size()}, {"Ni", parsed.invariants.size()},
      {"Nv", parsed.vectors.size()},   {"Nm", parsed.matrices.size()},
      {"Nh", parsed.states.size()},    {"No", parsed.outputs.size()},
  };
  for (size_t i = 0; i < counts.size(); ++i) {
    const int64_t count = static_cast<int64_t>(expected[i].count) * directions;
    if (counts[i] != count) {
      return absl::InvalidArgumentError(absl::StrCat("attr ", expected[i].name, " is ", counts[i],
                                                     "; the cell and ", directions,
                                                     " direction(s) need ", count));
    }
  }
  if (reverse.empty()) reverse.resize(directions, false);
  if (reverse.size() != static_cast<size_t>(directions)) {
    return absl::InvalidArgumentError(absl::StrCat("attr reverse has ", reverse.size(),
                                                   " elements; expected one for each of ",
                                                   directions, " direction(s), or none"));
  }
  RecurrentAttributes attributes;
  attributes.cell = std::move(parsed);
  attributes.units = units;
  attributes.directions = directions;
  attributes.reverse = std::move(reverse);
  attributes.batch_major = batch_major;
  return attributes;
}

absl::StatusOr<RecurrentCall> PrepareRecurrentCall(OpKernelContext* ctx,
                                                   const RecurrentAttributes& attributes) {
  const Cell& cell = attributes.cell;
  RecurrentCall call;
  for (bool reverse : attributes.reverse) call.directions.emplace_back().reverse = reverse;
  TFMEM_RETURN_IF_ERROR(ReadSizes(ctx, attributes.batch_major, &call));
  std::vector<TensorShape> matrices;
  for (const CellMatrix& matrix : cell.matrices) {
    TFMEM_RETURN_IF_ERROR(
        BuildShape({matrix.rows * attributes.units, matrix.columns * attributes.units},
                   &matrices.emplace_back()));
  }
  InputReader reader(ctx, attributes, &call);
  using Direction = RecurrentDirection;
  const std::vector<int> one_each(cell.states.size(), 1);
  TFMEM_RETURN_IF_ERROR(reader.Read("sequences", cell.sequences, 2, &Direction::sequences));
  TFMEM_RETURN_IF_ERROR(reader.Read("invariants", cell.invariants, 1, &Direction::invariants));
  TFMEM_RETURN_IF_ERROR(reader.Read("vectors", cell.vectors, 0, &Direction::vectors));
  TFMEM_RETURN_IF_ERROR(reader.Read("matrices", matrices, &Direction::matrices));
  TFMEM_RETURN_IF_ERROR(reader.Read("states", one_each, 1, &Direction::initials));
  TFMEM_RETURN_IF_ERROR(AllocateOutputs(ctx, attributes, &call));
  return call;
}

}  // namespace tfmem
