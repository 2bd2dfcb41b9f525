// Where the values of a batch lie.
#include "custom_ops/ops/dynamic/run.h"

namespace tfmem {
namespace {

constexpr int64_t kSlack = 256;  // floats that a panel may reach behind the last row

int64_t Aligned(int64_t floats) { return (floats + 15) / 16 * 16; }

}  // namespace

DynamicLayout::DynamicLayout(const DynamicSpec& spec, const DynamicBatch& batch) {
  const auto place = [this](int64_t rows, int64_t width) {
    const int64_t at = floats;
    floats += Aligned(rows * StrideOf(width));
    return at;
  };
  for (size_t type = 0; type < spec.types.size(); ++type) {
    states.emplace_back();
    for (int64_t width : spec.types[type]) {
      states.back().push_back(place(batch.types[type].count, width));
    }
  }
  for (size_t i = 0; i < spec.kinds.size(); ++i) {
    const DynamicKind& kind = spec.kinds[i];
    const int64_t rows = batch.kinds[i].count;
    kept.emplace_back();
    for (int64_t width : kind.kept) kept.back().push_back(place(rows, width));
    outputs.emplace_back();
    for (int64_t width : kind.outputs) outputs.back().push_back(place(rows, width));
    children.emplace_back();
    for (int type : kind.children) {
      children.back().emplace_back();
      const std::vector<bool>& puts = kind.puts[children.back().size() - 1];
      for (size_t state = 0; state < puts.size(); ++state) {
        children.back().back().push_back(puts[state] ? place(rows, spec.types[type][state]) : -1);
      }
    }
    losses.push_back(kind.has_loss ? place(rows, 1) : -1);
  }
  floats += kSlack;
}

}  // namespace tfmem
