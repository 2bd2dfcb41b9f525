#include "custom_ops/ops/cpu/expression_tiles.h"

#include <map>
#include <utility>

#include "absl/status/status.h"
#include "custom_ops/ops/cpu/tile_compiler.h"

namespace tfmem {
namespace {

using PlacedKind = PlacedNode::Kind;

constexpr int kCheapWork = 4;  // to compute a value again, instead of passing it on in memory

class Lowering {
 public:
  Lowering(const SizedExpression& expression, int inputs)
      : expression_(expression),
        domains_(expression),
        placement_(Place(expression, &domains_)),
        outputs_(inputs),
        buffers_(inputs + expression.outputs.size()),
        buffer_of_(placement_.nodes.size(), -1) {}

  absl::StatusOr<ExpressionTiles> Run() {
    result_.axes = expression_.axes;
    result_.checks = placement_.checks;
    FindStages();
    // Ports of outputs are numbered as these, those of buffers come after.
    result_.stores.resize(placement_.stores.size());
    tiles_.store_types.resize(placement_.stores.size());
    for (stage_ = 0; stage_ < static_cast<int>(places_.size()); ++stage_) {
      for (int place : places_[stage_]) Compute(place);
    }
    for (int i = 0; i < domains_.size(); ++i) result_.domains.push_back(domains_[i]);
    result_.program = CompileTile(tiles_).program;
    result_.program.domains = domains_.size();
    result_.program.checks = result_.checks.size();
    if (result_.program.wide_locations + result_.program.scalar_locations > kMostTileLocations) {
      return absl::UnimplementedError(
          "program: more values live at a time than tiles have room for");
    }
    return std::move(result_);
  }

 private:
  const PlacedNode& node(int place) const { return placement_.nodes[place]; }
  int domain() const { return tiles_.domains[stage_]; }
  AxisSet columns(int domain) const { return domains_[domain].column_set(); }

  void FindStages() {
    std::map<std::pair<int, int>, std::vector<int>> stages;
    for (size_t place = 0; place < placement_.nodes.size(); ++place) {
      if (!node(place).leaf()) stages[{node(place).level, node(place).domain}].push_back(place);
    }
    for (auto& [key, places] : stages) {
      result_.levels.push_back(key.first);
      tiles_.domains.push_back(key.second);
      places_.push_back(std::move(places));
    }
    at_.resize(stages.size());
  }

  bool Here(int place) const {
    const PlacedNode& value = node(place);
    return value.level == result_.levels[stage_] && value.domain == domain();
  }

  // The tiles' node of a value in this stage: computed here, or brought here.
  int At(int place) {
    if (node(place).kind == PlacedKind::kConstant) return Constant(place);
    if (auto found = at_[stage_].find(place); found != at_[stage_].end()) return found->second;
    const PlacedNode& value = node(place);
    TileNode tile = Begin(value);
    if (value.leaf()) {
      Load({value.tensor, value.dtype, value.access, 0, value.counter}, &tile);
    } else if (value.kind != PlacedKind::kReduceTiles && CheapAgain(place)) {
      return Compute(place);
    } else {
      const int buffer = BufferOf(place);
      Load({buffers_ + buffer, StorageOf(value.dtype), accesses_[buffer]}, &tile);
    }
    return at_[stage_][place] = Add(std::move(tile));
  }

  // One for all stages.
  int Constant(int place) {
    const auto [found, added] = constants_.try_emplace(place, tiles_.nodes.size());
    if (added) {
      TileNode tile = Begin(node(place));
      tile.value = node(place).value;
      Add(std::move(tile));
    }
    return found->second;
  }

  TileNode Begin(const PlacedNode& value) const {
    TileNode tile;
    tile.type = {value.dtype, (value.varies & columns(domain())).empty()};
    tile.stage = stage_;
    return tile;
  }

  int Add(TileNode tile) {
    tiles_.nodes.push_back(std::move(tile));
    return tiles_.nodes.size() - 1;
  }

  void Load(TilePort port, TileNode* tile) {
    tile->kind = TileNode::Kind::kLoad;
    const AxisSet rows = domains_[domain()].row_set();
    tile->same_rows = !rows.empty() && (port.access.varies() & rows).empty();
    AddPort(std::move(port), tile);
  }

  void AddPort(TilePort port, TileNode* tile) {
    port.domain = domain();
    tile->port = result_.loads.size();
    tiles_.loads.push_back(tile->type);
    result_.loads.push_back(std::move(port));
  }

  int Compute(int place) {
    const PlacedNode& value = node(place);
    TileNode tile = Begin(value);
    tile.op = value.op;
    tile.reduction = value.reduction;
    std::vector<int> arguments;
    for (int argument : value.arguments) arguments.push_back(At(argument));
    if (value.kind == PlacedKind::kReduceTiles) return Reduce(place, arguments[0]), -1;
    tile.arguments = std::move(arguments);
    switch (value.kind) {
      case PlacedKind::kGather:
        tile.kind = TileNode::Kind::kGather;
        AddPort({value.tensor, value.dtype, value.access}, &tile);
        break;
      case PlacedKind::kCast:
        tile.kind = TileNode::Kind::kCast;
        break;
      case PlacedKind::kReduceInTile:
        tile.kind = TileNode::Kind::kReduce;
        break;
      default:
        tile.kind = TileNode::Kind::kApply;
    }
    const int at = at_[stage_][place] = Add(std::move(tile));
    if (!Here(place)) return at;
    if (value.check >= 0) tiles_.checks.push_back({value.check, at});
    for (const PlacedStore& store : placement_.stores) {
      if (store.node != place) continue;
      const Access& access = expression_.outputs[store.output].access;
      Store(store.output, {outputs_ + store.output, value.dtype, access, domain()}, at);
    }
    return at;
  }

  void Store(int number, TilePort port, int node) {
    result_.stores[number] = std::move(port);
    tiles_.store_types[number] = tiles_.nodes[node].type;
    tiles_.stores.push_back({number, node});
  }

  void Reduce(int place, int argument) {
    const PlacedNode& value = node(place);
    const TileDomain& domain = domains_[value.domain];
    TileReduction reduction;
    reduction.reduction = value.reduction;
    reduction.type = tiles_.nodes[argument].type;
    reduction.rows = !(value.axes & domain.row_set()).empty();
    reduction.columns = !(value.axes & domain.column_set()).empty();
    reduction.domain = value.domain;
    if (reduction.columns) reduction.type.scalar = false;
    tiles_.parts.push_back({static_cast<int>(tiles_.reductions.size()), argument});
    tiles_.reductions.push_back(reduction);
    result_.totals.push_back({BufferOf(place), expression_.Positions(value.axes),
                              !(domain.row_set() - value.axes).empty()});
  }

  // Where a value passes to other stages: its numbers lie in the order in which its domain has
  // them.
  int BufferOf(int place) {
    int& buffer = buffer_of_[place];
    if (buffer >= 0) return buffer;
    buffer = result_.buffers.size();
    const PlacedNode& value = node(place);
    const TileDomain& domain = domains_[value.domain];
    std::vector<int> order = domain.rows;
    order.insert(order.end(), domain.columns.begin(), domain.columns.end());
    Access access;
    access.strides.assign(expression_.axes.size(), 0);
    int64_t numbers = 1;
    for (auto axis = order.rbegin(); axis != order.rend(); ++axis) {
      if (!value.varies.Has(*axis)) continue;
      access.strides[*axis] = numbers;
      numbers *= expression_.axes[*axis];
    }
    const DType dtype = StorageOf(value.dtype);
    result_.buffers.push_back({dtype, numbers});
    accesses_.push_back(access);
    if (value.kind == PlacedKind::kReduceTiles) return buffer;
    // Its stage was compiled before.
    for (size_t stage = 0; stage < places_.size(); ++stage) {
      if (result_.levels[stage] != value.level || tiles_.domains[stage] != value.domain) continue;
      const int at = at_[stage].at(place);
      tiles_.stores.push_back({static_cast<int>(result_.stores.size()), at});
      tiles_.store_types.push_back(tiles_.nodes[at].type);
      result_.stores.push_back({buffers_ + buffer, dtype, access, value.domain});
    }
    return buffer;
  }

  // Whether what varies along all axes of this domain is soon computed again of what is at hand.
  bool CheapAgain(int place) const {
    int work = kCheapWork;
    return VariesAlongAll(place) && Again(place, &work);
  }

  bool VariesAlongAll(int place) const {
    return node(place).varies == (domains_[domain()].row_set() | columns(domain()));
  }

  bool Again(int place, int* work) const {
    const PlacedNode& value = node(place);
    if (Here(place) || !VariesAlongAll(place)) return true;
    if (value.leaf()) return (*work -= value.kind == PlacedKind::kLoad) >= 0;
    const bool cheap = value.kind == PlacedKind::kCast ||
                       (value.kind == PlacedKind::kApply && InfoOf(value.op).work == 1);
    if (!cheap || --*work < 0) return false;
    for (int argument : value.arguments) {
      if (!Again(argument, work)) return false;
    }
    return true;
  }

  const SizedExpression& expression_;
  TileDomains domains_;
  const Placement placement_;
  const int outputs_;  // the first output among the tensors
  const int buffers_;
  std::vector<int> buffer_of_;            // of each node, or -1
  std::vector<Access> accesses_;          // of each buffer
  std::vector<std::vector<int>> places_;  // of each stage the nodes that are computed there
  std::vector<std::map<int, int>> at_;    // of each stage the tiles' nodes
  std::map<int, int> constants_;          // the tiles' nodes
  int stage_ = 0;
  TileExpression tiles_;
  ExpressionTiles result_;
};

}  // namespace

int64_t ExpressionTiles::Positions(const std::vector<int>& along) const {
  int64_t positions = 1;
  for (int axis : along) positions *= axes[axis];
  return positions;
}

absl::StatusOr<ExpressionTiles> CompileExpression(const SizedExpression& expression, int inputs) {
  return Lowering(expression, inputs).Run();
}

}  // namespace tfmem
