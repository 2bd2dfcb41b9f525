#include "custom_ops/ops/cpu/placement.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace tfmem {
namespace {

using PlacedKind = PlacedNode::Kind;

class Placing {
 public:
  Placing(const SizedExpression& expression, TileDomains* domains)
      : expression_(expression), domains_(*domains) {}

  Placement Run() {
    for (size_t i = 0; i < expression_.nodes.size(); ++i) AddNode(i);
    for (size_t i = 0; i < expression_.outputs.size(); ++i) AddStore(i);
    SinkNodes();
    return std::move(result_);
  }

 private:
  PlacedNode& node(int place) { return result_.nodes[place]; }
  const PlacedNode& node(int place) const { return result_.nodes[place]; }

  void AddNode(int number) {
    const SizedNode& sized = expression_.nodes[number];
    PlacedNode placed;
    placed.dtype = sized.dtype;
    const bool draws = sized.kind == ExpressionNode::Kind::kRandom;
    placed.tensor = draws || sized.kind == ExpressionNode::Kind::kInput ? sized.tensor : -1;
    placed.counter = draws ? sized.counter : -1;
    placed.access = sized.access;
    placed.value = sized.value;
    placed.op = sized.op;
    placed.reduction = sized.reduction;
    placed.axes = sized.axes;
    placed.varies = sized.varies;
    for (int argument : sized.arguments) placed.arguments.push_back(at_[argument]);
    switch (sized.kind) {
      case ExpressionNode::Kind::kConstant:
        break;
      case ExpressionNode::Kind::kInput:
      case ExpressionNode::Kind::kPosition:
      case ExpressionNode::Kind::kRandom:
        placed.kind = PlacedKind::kLoad;
        if (!sized.gathers.empty()) {
          placed.kind = PlacedKind::kGather;
          placed.arguments = {AddOffset(sized)};
        }
        break;
      case ExpressionNode::Kind::kCast:
        placed.kind = PlacedKind::kCast;
        break;
      case ExpressionNode::Kind::kApply:
        placed.kind = PlacedKind::kApply;
        break;
      case ExpressionNode::Kind::kReduce:
        placed.kind = domains_.Reduction(number).in_tile ? PlacedKind::kReduceInTile
                                                         : PlacedKind::kReduceTiles;
        placed.domain = domains_.Reduction(number).domain;
    }
    at_.push_back(Add(std::move(placed)));
  }

  // How far the numbers of a gather lie from where they would at indices of zero; 64 bits.
  int AddOffset(const SizedNode& gathers) {
    int offset = -1;
    for (const Gather& gather : gathers.gathers) {
      int index = -1;
      for (int value : gather.nodes) {
        PlacedNode wide;
        wide.kind = PlacedKind::kCast;
        wide.dtype = DType::kInt64;
        wide.arguments = {at_[value]};
        index = AddTo(index, Add(std::move(wide)));
      }
      if (gather.position.base != 0 || !gather.position.varies().empty()) {
        PlacedNode position;
        position.kind = PlacedKind::kLoad;
        position.dtype = DType::kInt64;
        position.access = gather.position;
        position.varies = gather.position.varies();
        index = AddTo(index, Add(std::move(position)));
      }
      node(index).check = result_.checks.size();
      result_.checks.push_back({gather.size, gather.axes});
      if (gather.stride != 1) {
        PlacedNode stride;
        stride.dtype = DType::kInt64;
        stride.value = gather.stride;
        index = Apply(Elementwise::kMultiply, index, Add(std::move(stride)));
      }
      offset = AddTo(offset, index);
    }
    return offset;
  }

  int AddTo(int sum, int term) { return sum < 0 ? term : Apply(Elementwise::kAdd, sum, term); }

  int Apply(Elementwise op, int a, int b) {
    PlacedNode placed;
    placed.kind = PlacedKind::kApply;
    placed.dtype = node(a).dtype;
    placed.op = op;
    placed.arguments = {a, b};
    return Add(std::move(placed));
  }

  int Add(PlacedNode placed) {
    if (placed.kind != PlacedKind::kReduceInTile && placed.kind != PlacedKind::kReduceTiles) {
      for (int argument : placed.arguments) placed.varies |= node(argument).varies;
    }
    if (!placed.arguments.empty()) PlaceNode(&placed);
    result_.nodes.push_back(std::move(placed));
    return result_.nodes.size() - 1;
  }

  // The first level at which the arguments are in a domain.
  int LevelIn(int domain, const PlacedNode& placed) const {
    int level = 0;
    for (int argument : placed.arguments) {
      const PlacedNode& read = node(argument);
      if (read.leaf()) continue;
      const bool here = read.domain == domain && read.kind != PlacedKind::kReduceTiles;
      level = std::max(level, read.level + !here);
    }
    return level;
  }

  // One number a row stays with the rows that it was reduced from, unless it waits for others.
  void PlaceNode(PlacedNode* placed) {
    const AxisSet along = placed->varies | placed->axes;
    const bool reduces = !placed->axes.empty();
    for (int argument : placed->arguments) {
      const PlacedNode& read = node(argument);
      if (read.leaf() || read.kind == PlacedKind::kReduceTiles) continue;
      const TileDomain& domain = domains_[read.domain];
      if (domain.row_set() != along || (reduces && !KeepsAlike(domain, *placed))) continue;
      const int level = LevelIn(read.domain, *placed);
      if (level != read.level) continue;
      placed->domain = read.domain;
      placed->level = level;
      if (reduces) placed->kind = PlacedKind::kReduceTiles;
      return;
    }
    if (!reduces) placed->domain = domains_.Of(along);
    placed->level = LevelIn(placed->domain, *placed);
  }

  // Whether a reduction of rows keeps what others of the domain keep.
  bool KeepsAlike(const TileDomain& domain, const PlacedNode& reduction) const {
    AxisSet kept;
    for (int i = 0; i < domain.kept; ++i) kept.Add(domain.rows[i]);
    const AxisSet keeps = domain.row_set() - reduction.axes;
    return keeps.empty() || keeps == kept;
  }

  // What is stored varies along the axes of its output, in a domain along these.
  void AddStore(int number) {
    const SizedOutput& output = expression_.outputs[number];
    int place = at_[output.node];
    if (node(place).leaf() || node(place).kind == PlacedKind::kReduceTiles ||
        node(place).varies != output.axes) {
      PlacedNode copy;
      copy.kind = PlacedKind::kCast;
      copy.dtype = node(place).dtype;
      copy.varies = output.axes;
      copy.arguments = {place};
      place = Add(std::move(copy));
    }
    result_.stores.push_back({place, number});
  }

  // Whether a value is there for its reader at the level at which it is computed.
  bool Passes(const PlacedNode& value, const PlacedNode& reader) const {
    return value.domain == reader.domain && value.kind != PlacedKind::kReduceTiles;
  }

  // What is not needed before a later level is computed there, unless it would make two other
  // values wait for that.
  void SinkNodes() {
    const int count = result_.nodes.size();
    std::vector<int> latest(count, kNever), level(count, kNever);
    for (std::vector<int>* levels : {&latest, &level}) {
      for (int place = count - 1; place >= 0; --place) {
        const PlacedNode& reader = node(place);
        int& at = (*levels)[place];
        const bool stays = reader.kind == PlacedKind::kReduceTiles || reader.check >= 0;
        if (stays || at == kNever) at = reader.level;
        if (levels == &level) {
          int waiting = 0;
          for (int argument : reader.arguments) {
            const PlacedNode& value = node(argument);
            waiting += !value.leaf() && Passes(value, reader) && latest[argument] < at;
          }
          if (waiting > 1) at = reader.level;
        }
        for (int argument : reader.arguments) {
          int& before = (*levels)[argument];
          before = std::min(before, at - !Passes(node(argument), reader));
        }
      }
    }
    for (int place = 0; place < count; ++place) node(place).level = level[place];
  }

  static constexpr int kNever = std::numeric_limits<int>::max();

  const SizedExpression& expression_;
  TileDomains& domains_;
  std::vector<int> at_;  // for each sized node the placed one
  Placement result_;
};

}  // namespace

Placement Place(const SizedExpression& expression, TileDomains* domains) {
  return Placing(expression, domains).Run();
}

}  // namespace tfmem
