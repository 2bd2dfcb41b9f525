// What each virtual processor does for one batch (VPPS, section III-B1): instructions of different
// lengths, with a signal at the end of each phase and a wait before the next.
//
// An instruction is one or more words of four bytes. The first is its op, and its length in words
// above that:
//
//   run       kind, first section, last section; first row; rows
//   steps     kind, section; first step, the one behind the last; first row; rows
//   columns   the same, of products; share, shares
//   gradient  parameter; block of rows; block of columns
//   sum_rows  parameter; first of the rows that were looked up; rows
//   signal    phase
//   wait      phase
//
// The paper's instructions are one op each. Here nodes of a kind on one level are rows that follow
// each other, so one instruction runs a section of a kind's code over a block of them. Where there
// are few, each processor has the same columns of a product for all of them, and finds its part of
// the weights in its cache from level to level; all else between two products is the first one's.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "custom_ops/ops/cpu/costs.h"
#include "custom_ops/ops/dynamic/batch.h"
#include "custom_ops/ops/dynamic/spec.h"

namespace tfmem {

enum class ScriptOp : uint32_t {
  kRun = 1,
  kGradient = 2,
  kSumRows = 3,
  kSignal = 4,
  kWait = 5,
  kSteps = 6,
  kColumns = 7
};

inline constexpr int64_t kBlockRows = 64;  // of nodes in one instruction
// Sizes of the part of a parameter's gradient that one instruction sums.
inline constexpr int64_t kGradientRows = 64;
inline constexpr int64_t kGradientColumns = 512;
inline constexpr int64_t kSummedRows = 256;

inline int64_t Blocks(int64_t count, int64_t block) { return (count + block - 1) / block; }

inline uint32_t FirstWord(ScriptOp op, int words) {
  return static_cast<uint32_t>(op) | static_cast<uint32_t>(words) << 8;
}
inline ScriptOp OpOf(uint32_t word) { return static_cast<ScriptOp>(word & 0xFF); }
inline int WordsOf(uint32_t word) { return static_cast<int>(word >> 8); }

struct Script {
  int phases = 0;
  double work = 0;           // about nanoseconds
  bool deals = false;        // columns of products
  std::vector<bool> shared;  // for each phase whether processors beside the first have work
  std::vector<std::vector<uint32_t>> processors;
};

struct ScriptOptions {
  bool forward = true;
  bool backward = false;
  int processors = 1;
  double worth_dealing =
      cpu_costs::kDealtProductsNs;  // nanoseconds of products that follow each other, at least
};

// `looked_up` is for each sparse parameter the number of its rows that the batch looks up; others
// have 0. An instruction goes to the processor that has the least to do in its phase.
Script BuildScript(const DynamicSpec& spec, const DynamicBatch& batch,
                   const std::vector<int64_t>& looked_up, const ScriptOptions& options);

// What has to hold before a script runs: instructions are known and whole, kinds, rows and
// parameters exist, and every processor signals each phase once, after having waited for the one
// before. Internal says which word does not.
absl::Status CheckScript(const DynamicSpec& spec, const DynamicBatch& batch,
                         const std::vector<int64_t>& looked_up, const Script& script);

}  // namespace tfmem
