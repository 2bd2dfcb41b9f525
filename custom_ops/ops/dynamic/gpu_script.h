// What a batch sends to a GPU: a table of places, lists, and a script for each virtual processor.
// Knows no TensorFlow and no driver.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "custom_ops/ops/dynamic/batch.h"
#include "custom_ops/ops/dynamic/gpu_program.h"
#include "custom_ops/ops/dynamic/run.h"
#include "custom_ops/ops/dynamic/spec.h"

namespace tfmem {

// As those of script.h, with these differences: what runs is a segment, a wait says for how many
// processors, a gradient's block is a tile. The first word is the op, and the words above that.
//
//   run       segment; first row; rows
//   gradient  parameter; block of rows; block of columns
//   sum_rows  parameter; first of the rows that were looked up; rows
//   signal    phase
//   wait      phase; processors that signal it
//   gather    pointer of the parameter; width; list; first node; nodes
//   losses    first example; examples
//   call      first word, word behind the last: of what many processors do, which is sent once
//   multiply  segment; first row; rows, at most those of a tile; first output: a tile of a product
enum class GpuOp : uint32_t {
  kRun = 1,
  kGradient = 2,
  kSumRows = 3,
  kSignal = 4,
  kWait = 5,
  kGather = 6,
  kLosses = 7,
  kCall = 8,
  kMultiply = 9
};

inline constexpr uint32_t kNowhere = 0xFFFFFFFF;  // the place of a value that a batch does not have
inline constexpr int64_t kTile = 64;  // rows and columns of a product's or a gradient's tile

struct GpuCall {
  bool forward = true;
  bool backward = false;
  int state_type = -1;  // whose states are wanted
  bool update = false;  // gradients are applied; a parameter that has none stays as it is
};

struct GpuSent {
  std::vector<uint32_t> words;
  int64_t floats = 0;  // of the batch's memory
  int phases = 0;
  int64_t common = 0;  // first word of what is called; scripts of processors lie behind
  // Where the rows of each sparse parameter that are looked up are listed.
  std::vector<int64_t> looked_up;
};

// The table and the lists; behind the table is space for where each processor's script begins.
void WriteGpuTables(const DynamicSpec& spec, const GpuProgram& program, const DynamicBatch& batch,
                    const DynamicLayout& layout, const std::vector<LookedUp>& looked_up,
                    GpuSent* sent);

// InvalidArgument if the batch needs more memory than four bytes can address.
absl::StatusOr<GpuSent> BuildGpuScript(const DynamicSpec& spec, const GpuProgram& program,
                                       const DynamicBatch& batch, const DynamicLayout& layout,
                                       const std::vector<LookedUp>& looked_up, const GpuCall& call);

// What has to hold before scripts run: instructions are whole and known, rows and lists exist, and
// no processor waits for a signal that does not come before. Internal says which word does not.
absl::Status CheckGpuScript(const DynamicSpec& spec, const GpuProgram& program,
                            const DynamicBatch& batch, const std::vector<LookedUp>& looked_up,
                            const GpuSent& sent);

}  // namespace tfmem
