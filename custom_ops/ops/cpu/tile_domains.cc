#include "custom_ops/ops/cpu/tile_domains.h"

#include <algorithm>
#include <cstdlib>

namespace tfmem {
namespace {

using Kind = ExpressionNode::Kind;

constexpr int64_t kLongestRow = 1 << 16;  // of a tile: some rows fill an L2
// A row that is longer gives work to several threads, unless there are many.
constexpr int64_t kLongestOfFew = 1 << 13;
constexpr int64_t kFewRows = 8;

// The axis along which numbers lie closest together; -1 if there is none.
int Innermost(const Access& access) {
  int innermost = -1;
  for (size_t axis = 0; axis < access.strides.size(); ++axis) {
    const int64_t stride = std::abs(access.strides[axis]);
    if (stride == 0) continue;
    if (innermost < 0 || stride < std::abs(access.strides[innermost])) innermost = axis;
  }
  return innermost;
}

// The domains for one set of axes.
class Choice {
 public:
  Choice(const SizedExpression& expression, AxisSet axes) : expression_(expression), axes_(axes) {
    for (size_t i = 0; i < expression.nodes.size(); ++i) {
      const SizedNode& node = expression.nodes[i];
      AxisSet along = node.varies;
      for (int argument : node.arguments) along |= expression.nodes[argument].varies;
      if ((along | node.axes) != axes) continue;
      if (node.kind == Kind::kReduce) waiting_.push_back(i);
      if (node.kind == Kind::kInput) AddInput(node);
      for (int argument : node.arguments) AddRead(argument);
    }
    for (const SizedOutput& output : expression.outputs) {
      if (output.axes != axes) continue;
      accesses_.push_back(&output.access);
      AddRead(output.node);
    }
    FindOrder();
  }

  bool done() const { return waiting_.empty(); }

  // A domain, and the reductions that it takes of those that wait: one at least.
  TileDomain Next(std::vector<int>* within_tiles, std::vector<int>* over_tiles) {
    const int whole_rows = WholeRows();
    const int first_column = whole_rows >= 0 ? whole_rows : FirstColumn();
    TileDomain domain;
    domain.rows.assign(order_.begin(), order_.begin() + first_column);
    domain.columns.assign(order_.begin() + first_column, order_.end());
    const AxisSet rows = domain.row_set(), columns = domain.column_set();
    AxisSet kept;
    std::vector<int> left;
    for (int node : waiting_) {
      const AxisSet keeps = rows - Reduced(node);
      if (whole_rows >= 0 && Reduced(node) == columns) {
        within_tiles->push_back(node);
      } else if (AllOrNone(node, columns) && (keeps.empty() || kept.empty() || keeps == kept)) {
        over_tiles->push_back(node);
        kept |= keeps;
      } else {
        left.push_back(node);
      }
    }
    waiting_ = left;
    std::stable_partition(domain.rows.begin(), domain.rows.end(),
                          [kept](int axis) { return kept.Has(axis); });
    for (int axis : domain.rows) domain.kept += kept.Has(axis);
    return domain;
  }

 private:
  void AddRead(int number) {
    const SizedNode& node = expression_.nodes[number];
    if (node.kind == Kind::kInput && node.varies != axes_) return AddInput(node);
    // Computed numbers lie in the order of the axes.
    if (node.kind != Kind::kInput && !node.varies.empty()) parts_.push_back(node.varies);
  }

  void AddInput(const SizedNode& node) {
    accesses_.push_back(&node.access);
    AxisSet gathered;
    for (const Gather& gather : node.gathers) {
      gathered |= gather.position.varies();
      for (int value : gather.nodes) gathered |= expression_.nodes[value].varies;
    }
    if (!gathered.empty()) parts_.push_back(gathered);
  }

  // From the slowest axis to the fastest in most tensors that vary along all of them.
  void FindOrder() {
    std::vector<int> votes(expression_.axes.size(), 0);
    const Access* typical = nullptr;
    for (const Access* access : accesses_) {
      const int innermost = Innermost(*access);
      if (innermost < 0 || access->varies() != axes_) continue;
      ++votes[innermost];
      if (typical == nullptr || votes[innermost] > votes[Innermost(*typical)]) typical = access;
    }
    for (size_t axis = 0; axis < expression_.axes.size(); ++axis) {
      if (axes_.Has(axis)) order_.push_back(axis);
    }
    if (typical == nullptr) return;
    std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) {
      return std::abs(typical->strides[a]) > std::abs(typical->strides[b]);
    });
  }

  AxisSet Reduced(int node) const { return expression_.nodes[node].axes; }

  bool AllOrNone(int node, AxisSet axes) const {
    const AxisSet reduced = Reduced(node) & axes;
    return reduced.empty() || reduced == axes;
  }

  // The axes in order from one on.
  AxisSet From(int first) const {
    return AxisSet::Of(std::vector<int>(order_.begin() + first, order_.end()));
  }

  // The first column if whole rows are reduced within tiles: the fewest columns. -1: none are.
  int WholeRows() const {
    for (int first = static_cast<int>(order_.size()) - 1; first >= 0; --first) {
      const int64_t columns = expression_.Positions(From(first));
      if (columns == 0) return -1;
      const int64_t rows = expression_.Positions(axes_) / columns;
      if (columns > (rows < kFewRows ? kLongestOfFew : kLongestRow)) return -1;
      for (int node : waiting_) {
        if (Reduced(node) == From(first)) return first;
      }
    }
    return -1;
  }

  // The first of as many columns as lie one behind the other in all that is read, and are reduced
  // together.
  int FirstColumn() const {
    int first = std::max<int>(order_.size(), 1) - 1;
    for (; first > 0; --first) {
      const int axis = order_[first - 1], next = order_[first];
      for (const Access* access : accesses_) {
        if (!access->uneven.empty() ||
            access->strides[axis] != access->strides[next] * expression_.axes[next]) {
          return first;
        }
      }
      for (AxisSet part : parts_) {
        if (part.Has(axis) != part.Has(next)) return first;
      }
      for (int node : waiting_) {
        if (!AllOrNone(node, From(first - 1))) return first;
      }
    }
    return first;
  }

  const SizedExpression& expression_;
  const AxisSet axes_;
  std::vector<const Access*> accesses_;  // of tensors that are read or written here
  std::vector<AxisSet> parts_;           // along which other values vary that are read here
  std::vector<int> order_;
  std::vector<int> waiting_;  // reductions
};

}  // namespace

AxisSet TileDomain::row_set() const { return AxisSet::Of(rows); }
AxisSet TileDomain::column_set() const { return AxisSet::Of(columns); }

TileDomains::TileDomains(const SizedExpression& expression) : expression_(expression) {
  for (const SizedNode& node : expression.nodes) {
    if (node.kind == Kind::kReduce) Of(expression.nodes[node.arguments[0]].varies | node.axes);
  }
}

int TileDomains::Of(AxisSet axes) {
  const auto [found, added] = domain_of_.try_emplace(axes, domains_.size());
  if (!added) return found->second;
  Choice choice(expression_, axes);
  do {
    const int domain = domains_.size();
    std::vector<int> within_tiles, over_tiles;
    domains_.push_back(choice.Next(&within_tiles, &over_tiles));
    for (int node : within_tiles) reductions_[node] = {domain, true};
    for (int node : over_tiles) reductions_[node] = {domain, false};
  } while (!choice.done());
  return found->second;
}

}  // namespace tfmem
