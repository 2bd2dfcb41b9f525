// Where the values of a batch lie.
#include "absl/strings/str_cat.h"
#include "custom_ops/ops/dynamic/run.h"
#include "custom_ops/ops/sizes.h"

namespace tfmem {

absl::StatusOr<DynamicLayout> DynamicLayout::Of(const DynamicSpec& spec,
                                                const DynamicBatch& batch) {
  DynamicLayout layout;
  Size floats = 0;
  const auto place = [&floats](int64_t rows, int64_t width) {
    const Size at = floats;
    floats = floats + AlignedFloats(rows, width);
    return at.value();
  };
  for (size_t type = 0; type < spec.types.size(); ++type) {
    layout.states.emplace_back();
    for (int64_t width : spec.types[type]) {
      layout.states.back().push_back(place(batch.types[type].count, width));
    }
  }
  for (size_t i = 0; i < spec.kinds.size(); ++i) {
    const DynamicKind& kind = spec.kinds[i];
    const int64_t rows = batch.kinds[i].count;
    layout.kept.emplace_back();
    for (int64_t width : kind.kept) layout.kept.back().push_back(place(rows, width));
    layout.outputs.emplace_back();
    for (int64_t width : kind.outputs) layout.outputs.back().push_back(place(rows, width));
    layout.children.emplace_back();
    for (int type : kind.children) {
      std::vector<std::vector<int64_t>>& children = layout.children.back();
      const std::vector<bool>& puts = kind.puts[children.size()];
      children.emplace_back();
      for (size_t state = 0; state < puts.size(); ++state) {
        children.back().push_back(puts[state] ? place(rows, spec.types[type][state]) : -1);
      }
    }
    layout.losses.push_back(kind.has_loss ? place(rows, 1) : -1);
  }
  floats = floats + kSlack;
  if (!floats.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("a batch of ", batch.nodes,
                     " nodes needs more numbers than 64 bits count: give smaller batches"));
  }
  layout.floats = floats.value();
  return layout;
}

}  // namespace tfmem
