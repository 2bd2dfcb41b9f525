// What the CPU's and the GPU's kernel of TfmemRecurrent share: its attributes and its tensors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "custom_ops/ops/recurrent/cell.h"
#include "custom_ops/ops/recurrent/sequence_lines.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {

struct RecurrentAttributes {
  Cell cell;
  int64_t units = 0;
  int directions = 1;
  std::vector<bool> reverse;  // one for each direction
  bool batch_major = false;
};

// Puts attributes together; InvalidArgument if they do not fit each other. `counts` are Ns, Ni, Nv,
// Nm, Nh and No, over all directions.
absl::StatusOr<RecurrentAttributes> MakeRecurrentAttributes(const std::string& cell, int64_t units,
                                                            int64_t directions,
                                                            std::vector<bool> reverse,
                                                            bool batch_major,
                                                            const std::vector<int64_t>& counts);

// Reads them from an op that is constructed, or whose shapes are inferred.
template <typename Context>
absl::StatusOr<RecurrentAttributes> ReadRecurrentAttributes(Context* ctx) {
  std::string cell;
  int64_t units = 0;
  int64_t directions = 0;
  std::vector<bool> reverse;
  bool batch_major = false;
  std::vector<int64_t> counts;
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("cell", &cell));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("units", &units));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("directions", &directions));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("reverse", &reverse));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("batch_major", &batch_major));
  for (const char* name : {"Ns", "Ni", "Nv", "Nm", "Nh", "No"}) {
    TFMEM_RETURN_IF_ERROR(ctx->GetAttr(name, &counts.emplace_back()));
  }
  return MakeRecurrentAttributes(cell, units, directions, std::move(reverse), batch_major, counts);
}

// The data of one direction's tensors, in the order of the cell. Sequences and outputs begin with
// time and batch, or with batch and time (`batch_major`).
struct RecurrentDirection {
  std::vector<const void*> sequences;   // [time, batch, columns * units] or [time, batch]
  std::vector<const void*> invariants;  // [batch, columns * units]
  std::vector<const void*> vectors;     // [columns * units]
  std::vector<const void*> matrices;    // [rows * units, columns * units]
  std::vector<const void*> initials;    // [batch, units]; null for zeros
  std::vector<void*> outputs;           // [time, batch, columns * units] or [time, batch]
  std::vector<void*> finals;            // [batch, units]
  bool reverse = false;
};

struct RecurrentCall {
  int64_t time = 0;
  int64_t batch = 0;
  bool batch_major = false;
  std::vector<RecurrentDirection> directions;

  SequenceLines lines() const { return SequenceLines::Of(time, batch, batch_major); }
  // The first two dimensions of a sequence.
  std::vector<int64_t> leading() const {
    return batch_major ? std::vector<int64_t>{batch, time} : std::vector<int64_t>{time, batch};
  }
};

// Checks the shapes of the inputs and allocates the outputs.
absl::StatusOr<RecurrentCall> PrepareRecurrentCall(tensorflow::OpKernelContext* ctx,
                                                   const RecurrentAttributes& attributes);

}  // namespace tfmem
