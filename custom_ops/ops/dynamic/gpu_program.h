// A GPU program of a dynamic net, as custom_ops/dynamic/codegen/gpu_program.py writes it.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "custom_ops/ops/cuda/kernel_image.h"
#include "custom_ops/ops/dynamic/spec.h"

namespace tfmem {

// What runs between two barriers for nodes of a kind.
struct GpuSegment {
  int number = 0;  // as the kernel knows it
  int round = 0;   // of its section; those of one round run side by side
  int first = 0;   // a product's first processor
  int count = 0;   // and how many have a part of it; 0: one processor runs it for a block of nodes
  int64_t cost = 0;     // of a node, in cycles
  int64_t outputs = 0;  // of a product that tensor cores may compute in tiles; else 0
  int64_t depth = 0;    // terms of its sums
};

struct GpuProgram {
  KernelImage image;
  int64_t processors = 1;
  int64_t table = 0;                          // words
  int64_t words = 0;                          // of the kernel's parameter
  std::vector<std::vector<int64_t>> spilled;  // widths, of each kind
  // Segments of each kind and section.
  std::vector<std::vector<std::vector<GpuSegment>>> segments;
};

// Words of the kernel's parameter (kernels/dynamic.cuh).
enum GpuWord {
  kSentWord,
  kMemoryWord,
  kStatusWord,
  kSeedWord,
  kRuleWord,
  kLossGradientsWord,
  kRatesWord,
  kMoreRatesWord,
  kLossesWord,
  kGradientTypeWord,
  kFailureWord,
  kPointerWords
};

// InvalidArgument says what is wrong: that it is for other kinds of nodes than `spec`, too.
absl::StatusOr<GpuProgram> ReadGpuProgram(absl::string_view header, absl::string_view code,
                                          const DynamicSpec& spec, absl::string_view spec_text);

// Words of the table, in the order of custom_ops/dynamic/codegen/batch_table.py.
int64_t TableWords(const DynamicSpec& spec, const std::vector<std::vector<int64_t>>& spilled);
int64_t MostOutputs(const DynamicSpec& spec);
int64_t MostStates(const DynamicSpec& spec);

}  // namespace tfmem
