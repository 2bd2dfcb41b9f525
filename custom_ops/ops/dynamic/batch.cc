#include "custom_ops/ops/dynamic/batch.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

constexpr int64_t kMostNodes = std::numeric_limits<int32_t>::max() / 4;

class Decoder {
 public:
  Decoder(const DynamicSpec& spec, const RaggedIntegers& kinds, const RaggedIntegers& children,
          const RaggedIntegers& arguments)
      : spec_(spec), kinds_(kinds), children_(children), arguments_(arguments) {}

  absl::StatusOr<DynamicBatch> Decode() {
    TFMEM_RETURN_IF_ERROR(CheckSplits("kinds", kinds_));
    TFMEM_RETURN_IF_ERROR(CheckSplits("children", children_));
    TFMEM_RETURN_IF_ERROR(CheckSplits("arguments", arguments_));
    batch_.examples = kinds_.splits.size() - 1;
    batch_.nodes = kinds_.values.size();
    if (children_.splits.size() != kinds_.splits.size() ||
        arguments_.splits.size() != kinds_.splits.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a batch of ", batch_.examples, " examples by its kinds, ", children_.splits.size() - 1,
          " by its children and ", arguments_.splits.size() - 1, " by its arguments"));
    }
    batch_.kind_of.assign(kinds_.values.begin(), kinds_.values.end());
    batch_.first_of.assign(kinds_.splits.begin(), kinds_.splits.end());
    first_child_.resize(batch_.nodes);
    first_argument_.resize(batch_.nodes);
    level_.assign(batch_.nodes, 0);
    for (int64_t example = 0; example < batch_.examples; ++example) {
      TFMEM_RETURN_IF_ERROR(Read(example));
    }
    Order();
    Rows();
    Parents();
    return std::move(batch_);
  }

 private:
  static absl::Status CheckSplits(absl::string_view name, const RaggedIntegers& ragged) {
    const int64_t size = ragged.values.size();
    const auto& splits = ragged.splits;
    if (size <= kMostNodes && !splits.empty() && splits.front() == 0 && splits.back() == size &&
        std::is_sorted(splits.begin(), splits.end())) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "the row splits of ", name, " do not increase from 0 to the number of values, ", size,
        ", of which there may be ", kMostNodes));
  }

  template <typename... Parts>
  absl::Status Wrong(int64_t example, int64_t node, const Parts&... parts) const {
    return absl::InvalidArgumentError(absl::StrCat(
        "example ", example, ", node ", node - batch_.first_of[example], ": ", parts...));
  }

  absl::Status Read(int64_t example) {
    const int64_t first = batch_.first_of[example], end = batch_.first_of[example + 1];
    int64_t child = children_.splits[example], argument = arguments_.splits[example];
    bool ordered = true;
    const int64_t kinds = spec_.kinds.size();
    for (int64_t node = first; node < end; ++node) {
      const int32_t number = batch_.kind_of[node];
      if (number < 0 || number >= kinds) {
        return Wrong(example, node, "kind ", number, "; expected 0 to ", kinds - 1);
      }
      const DynamicKind& kind = spec_.kinds[number];
      first_child_[node] = child;
      first_argument_[node] = argument;
      child += kind.children.size();
      argument += kind.arguments.size();
      if (child > children_.splits[example + 1] || argument > arguments_.splits[example + 1]) break;
      int level = 0;
      for (size_t slot = 0; slot < kind.children.size(); ++slot) {
        const int64_t place = children_.values[first_child_[node] + slot];
        if (place < 0 || place >= end - first) {
          return Wrong(example, node, "child ", slot, " is node ", place, "; expected 0 to ",
                       end - first - 1);
        }
        ordered &= first + place < node;
        if (first + place < node) level = std::max(level, level_[first + place] + 1);
      }
      level_[node] = level;
      for (size_t i = 0; i < kind.arguments.size(); ++i) {
        const int32_t value = arguments_.values[first_argument_[node] + i];
        if (value < 0 || value >= kind.arguments[i]) {
          return Wrong(example, node, "argument ", i, " of kind ", number, " is ", value,
                       "; expected 0 to ", kind.arguments[i] - 1);
        }
      }
    }
    if (child != children_.splits[example + 1] || argument != arguments_.splits[example + 1]) {
      return absl::InvalidArgumentError(absl::StrCat(
          "example ", example, " has ", children_.splits[example + 1] - children_.splits[example],
          " children and ", arguments_.splits[example + 1] - arguments_.splits[example],
          " arguments; its kinds of nodes have another number of them"));
    }
    TFMEM_RETURN_IF_ERROR(CheckTypes(example, first, end));
    return ordered ? absl::OkStatus() : Sort(example, first, end);
  }

  absl::Status CheckTypes(int64_t example, int64_t first, int64_t end) const {
    for (int64_t node = first; node < end; ++node) {
      const DynamicKind& kind = spec_.kinds[batch_.kind_of[node]];
      for (size_t slot = 0; slot < kind.children.size(); ++slot) {
        const int64_t child = first + children_.values[first_child_[node] + slot];
        const int found = spec_.kinds[batch_.kind_of[child]].type;
        if (found == kind.children[slot]) continue;
        return Wrong(example, node, "child ", slot, " has a state of [",
                     absl::StrJoin(spec_.types[found], ", "), "] numbers; expected [",
                     absl::StrJoin(spec_.types[kind.children[slot]], ", "), "]");
      }
    }
    return absl::OkStatus();
  }

  // Levels where a child comes behind its parent; a node that never gets one is on a cycle, or
  // above one.
  absl::Status Sort(int64_t example, int64_t first, int64_t end) {
    const int64_t nodes = end - first;
    std::vector<int32_t> waiting(nodes), offsets(nodes + 1), parents, ready;
    const auto each_edge = [&](auto visit) {
      for (int64_t node = 0; node < nodes; ++node) {
        const size_t count = spec_.kinds[batch_.kind_of[first + node]].children.size();
        for (size_t slot = 0; slot < count; ++slot) {
          visit(node, children_.values[first_child_[first + node] + slot]);
        }
      }
    };
    each_edge([&](int64_t node, int32_t child) {
      ++waiting[node];
      ++offsets[child + 1];
    });
    std::partial_sum(offsets.begin(), offsets.end(), offsets.begin());
    parents.resize(offsets.back());
    std::vector<int32_t> place(offsets.begin(), offsets.end() - 1);
    each_edge([&](int64_t node, int32_t child) { parents[place[child]++] = node; });
    for (int64_t node = 0; node < nodes; ++node) {
      level_[first + node] = 0;
      if (waiting[node] == 0) ready.push_back(node);
    }
    for (size_t next = 0; next < ready.size(); ++next) {
      const int32_t child = ready[next];
      for (int32_t i = offsets[child]; i < offsets[child + 1]; ++i) {
        const int32_t node = parents[i];
        level_[first + node] = std::max(level_[first + node], level_[first + child] + 1);
        if (--waiting[node] == 0) ready.push_back(node);
      }
    }
    if (static_cast<int64_t>(ready.size()) == nodes) return absl::OkStatus();
    const auto stuck =
        std::find_if(waiting.begin(), waiting.end(), [](int32_t w) { return w > 0; });
    return Wrong(example, first + (stuck - waiting.begin()),
                 "it is on a cycle, or above one; a node's children must not depend on it");
  }

  // Nodes by level, then kind, then as they came.
  void Order() {
    std::vector<int32_t> by_kind(batch_.nodes);
    order_.resize(batch_.nodes);
    batch_.levels = 0;
    for (int level : level_) batch_.levels = std::max(batch_.levels, level + 1);
    std::vector<int64_t> count(std::max<size_t>(spec_.kinds.size(), batch_.levels) + 1);
    for (int32_t kind : batch_.kind_of) ++count[kind + 1];
    std::partial_sum(count.begin(), count.end(), count.begin());
    for (int64_t node = 0; node < batch_.nodes; ++node) {
      by_kind[count[batch_.kind_of[node]]++] = node;
    }
    std::fill(count.begin(), count.end(), 0);
    for (int level : level_) ++count[level + 1];
    std::partial_sum(count.begin(), count.end(), count.begin());
    for (int32_t node : by_kind) order_[count[level_[node]]++] = node;
  }

  void Rows() {
    batch_.kinds.resize(spec_.kinds.size());
    batch_.types.resize(spec_.types.size());
    batch_.row_of.resize(batch_.nodes);
    state_of_.resize(batch_.nodes);
    std::vector<int32_t> example_of(batch_.nodes);
    for (int64_t example = 0; example < batch_.examples; ++example) {
      std::fill(example_of.begin() + batch_.first_of[example],
                example_of.begin() + batch_.first_of[example + 1], example);
    }
    for (size_t i = 0; i < spec_.kinds.size(); ++i) {
      batch_.kinds[i].children.resize(spec_.kinds[i].children.size());
      batch_.kinds[i].arguments.resize(spec_.kinds[i].arguments.size());
    }
    for (int32_t node : order_) {
      const int32_t number = batch_.kind_of[node];
      const DynamicKind& kind = spec_.kinds[number];
      KindRows& rows = batch_.kinds[number];
      TypeRows& type = batch_.types[kind.type];
      if (batch_.groups.empty() || batch_.groups.back().kind != number ||
          batch_.groups.back().level != level_[node]) {
        batch_.groups.push_back({level_[node], number, rows.count, 0, type.count});
      }
      ++batch_.groups.back().count;
      batch_.row_of[node] = rows.count++;
      state_of_[node] = type.count++;
      rows.nodes.push_back(node);
      rows.examples.push_back(example_of[node]);
      rows.states.push_back(state_of_[node]);
      const int64_t first = batch_.first_of[example_of[node]];
      for (size_t slot = 0; slot < kind.children.size(); ++slot) {
        const int32_t child = first + children_.values[first_child_[node] + slot];
        rows.children[slot].push_back(state_of_[child]);
      }
      for (size_t i = 0; i < kind.arguments.size(); ++i) {
        rows.arguments[i].push_back(arguments_.values[first_argument_[node] + i]);
      }
    }
  }

  void Parents() {
    for (TypeRows& type : batch_.types) type.first_parent.assign(type.count + 1, 0);
    const auto each_edge = [&](auto visit) {
      for (int64_t node = 0; node < batch_.nodes; ++node) {
        const int32_t number = batch_.kind_of[node];
        const DynamicKind& kind = spec_.kinds[number];
        for (size_t slot = 0; slot < kind.children.size(); ++slot) {
          const int32_t row = batch_.row_of[node];
          visit(batch_.types[kind.children[slot]], batch_.kinds[number].children[slot][row],
                ParentEntry{number, static_cast<int32_t>(slot), row});
        }
      }
    };
    each_edge(
        [](TypeRows& type, int32_t child, const ParentEntry&) { ++type.first_parent[child + 1]; });
    std::vector<std::vector<int32_t>> place;
    for (TypeRows& type : batch_.types) {
      std::partial_sum(type.first_parent.begin(), type.first_parent.end(),
                       type.first_parent.begin());
      type.parents.resize(type.first_parent.back());
      place.emplace_back(type.first_parent);
    }
    each_edge([&](TypeRows& type, int32_t child, const ParentEntry& entry) {
      type.parents[place[&type - batch_.types.data()][child]++] = entry;
    });
  }

  const DynamicSpec& spec_;
  const RaggedIntegers kinds_;
  const RaggedIntegers children_;
  const RaggedIntegers arguments_;
  DynamicBatch batch_;
  std::vector<int64_t> first_child_;  // of each node
  std::vector<int64_t> first_argument_;
  std::vector<int> level_;
  std::vector<int32_t> order_;
  std::vector<int32_t> state_of_;  // of each node the row of its type
};

}  // namespace

absl::StatusOr<DynamicBatch> DecodeBatch(const DynamicSpec& spec, const RaggedIntegers& kinds,
                                         const RaggedIntegers& children,
                                         const RaggedIntegers& arguments) {
  return Decoder(spec, kinds, children, arguments).Decode();
}

}  // namespace tfmem
