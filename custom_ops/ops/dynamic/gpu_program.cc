#include "custom_ops/ops/dynamic/gpu_program.h"

#include <algorithm>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/sha256.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

constexpr int64_t kMostProcessors = 1 << 12;
constexpr int64_t kMostSegments = 1 << 16;
constexpr int64_t kMostWords = 512;  // CUDA's limit of a parameter is 4096 bytes

}  // namespace

int64_t MostOutputs(const DynamicSpec& spec) {
  size_t most = 0;
  for (const DynamicKind& kind : spec.kinds) most = std::max(most, kind.outputs.size());
  return most;
}

int64_t MostStates(const DynamicSpec& spec) {
  size_t most = 0;
  for (const auto& widths : spec.types) most = std::max(most, widths.size());
  return most;
}

int64_t TableWords(const DynamicSpec& spec, const std::vector<std::vector<int64_t>>& spilled) {
  int64_t words = 2 + 3 * spec.parameters.size();
  for (const auto& widths : spec.types) words += widths.size() + 2;
  for (size_t i = 0; i < spec.kinds.size(); ++i) {
    const DynamicKind& kind = spec.kinds[i];
    words += 5 + kind.children.size() + kind.arguments.size() + kind.kept.size() +
             spilled[i].size() + kind.outputs.size();
    for (int child : kind.children) words += spec.types[child].size();
  }
  return words;
}

absl::StatusOr<GpuProgram> ReadGpuProgram(absl::string_view text, absl::string_view code,
                                          const DynamicSpec& spec, absl::string_view spec_text) {
  TFMEM_ASSIGN_OR_RETURN(KernelHeader header, KernelHeader::Parse(text));
  GpuProgram program;
  if (header.Text("spec") != Sha256(spec_text)) {
    return WrongProgram("the kernel is of other kinds of nodes");
  }
  program.processors = header.Number("processors", 1, kMostProcessors);
  program.table = header.Number("table", 0, 1 << 20);
  program.words = header.Number("words", 0, kMostWords);
  const int64_t segments = header.Number("segments", 0, kMostSegments);
  TFMEM_ASSIGN_OR_RETURN(program.image, ReadImage(&header, code));
  for (size_t kind = 0; kind < spec.kinds.size(); ++kind) {
    program.spilled.push_back(header.Numbers(absl::StrCat("spilled", kind), 1, kMostWidth));
    program.segments.emplace_back(kGradients);
  }
  if (!header.status().ok()) return header.status();
  const int64_t words = kPointerWords + 3 * int64_t(spec.parameters.size()) + MostOutputs(spec) +
                        2 * MostStates(spec);
  if (program.table != TableWords(spec, program.spilled) || program.words != words) {
    return WrongProgram("the kernel's tables have another size than its kinds of nodes give");
  }
  for (int64_t number = 0; number < segments; ++number) {
    const std::string key = absl::StrCat("segment", number);
    const std::vector<int64_t> n = header.Numbers(key, 0, std::numeric_limits<int32_t>::max());
    if (n.size() != 8 || n[0] >= int64_t(spec.kinds.size()) || n[1] >= kGradients ||
        n[2] >= segments || n[3] >= program.processors || n[4] > program.processors ||
        n[6] > kMostWidth || n[7] > kMostWidth || (n[6] > 0) != (n[7] > 0)) {
      return WrongProgram(absl::StrCat("'", key, "' is '", header.Text(key), "'"));
    }
    program.segments[n[0]][n[1]].push_back({static_cast<int>(number), static_cast<int>(n[2]),
                                            static_cast<int>(n[3]), static_cast<int>(n[4]), n[5],
                                            n[6], n[7]});
  }
  if (!header.status().ok()) return header.status();
  return program;
}

}  // namespace tfmem
