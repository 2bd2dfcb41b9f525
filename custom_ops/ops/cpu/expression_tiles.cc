#include "custom_ops/ops/cpu/expression_tiles.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "custom_ops/ops/cpu/tile_compiler.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

using Kind = ExpressionNode::Kind;
using Code = TileInstruction::Kind;

// With one choice of the columns. A node has a phase, which modulo the number of domains is its
// domain; phases that are used become stages, in their order.
class Lowering {
 public:
  Lowering(const Expression& expression, int column) : expression_(expression) {
    result_.column = column;
    column_ = column < 0 ? 0 : 1u << column;
  }

  absl::StatusOr<ExpressionTiles> Run() {
    FindDomains();
    for (const ExpressionNode& node : expression_.nodes) {
      TFMEM_RETURN_IF_ERROR(Lower(node));
    }
    for (size_t i = 0; i < expression_.outputs.size(); ++i) Store(i);
    std::map<int, int> stages;
    for (const TileNode& node : tiles_.nodes) stages[node.stage] = 0;
    for (auto& [phase, stage] : stages) {
      stage = tiles_.domains.size();
      tiles_.domains.push_back(phase % result_.rows.size());
    }
    for (TileNode& node : tiles_.nodes) node.stage = stages[node.stage];
    result_.program = CompileTile(tiles_).program;
    if (result_.program.wide_locations + result_.program.scalar_locations > kMostTileLocations) {
      return absl::UnimplementedError(
          "program: more values live at a time than tiles have room for");
    }
    return std::move(result_);
  }

 private:
  // Axes that something varies along together are of one domain.
  void FindDomains() {
    std::vector<uint32_t> domains;
    auto tie = [&](uint32_t axes) {
      axes &= ~column_;
      if (axes == 0) return;
      for (uint32_t& other : domains) {
        if ((other & axes) != 0) axes |= std::exchange(other, 0);
      }
      domains.push_back(axes);
    };
    for (const ExpressionNode& node : expression_.nodes) tie(node.varies | node.axes);
    for (const ExpressionOutput& output : expression_.outputs) tie(output.varies());
    result_.rows.resize(1);
    for (uint32_t domain : domains) {
      if (domain == 0) continue;
      std::vector<int>& axes = result_.rows.emplace_back();
      for (int axis = 0; axis < kMostAxes; ++axis) {
        if (domain >> axis & 1) axes.push_back(axis);
      }
    }
  }

  absl::Status Lower(const ExpressionNode& node) {
    TileNode tile = Begin(node.dtype, node.varies);
    tile.op = node.op;
    tile.value = node.value;
    if (node.kind == Kind::kReduce) return LowerReduction(node, tile);
    for (int argument : node.arguments) AddArgument(at_[argument], &tile);
    if (node.kind == Kind::kConstant) {
      tile.kind = TileNode::Kind::kConstant;
    } else if (node.kind == Kind::kCast) {
      tile.kind = TileNode::Kind::kCast;
    } else if (node.kind == Kind::kApply) {
      tile.kind = TileNode::Kind::kApply;
    } else {
      tile.kind = TileNode::Kind::kLoad;
      tile.port = result_.loads.size();
      result_.loads.push_back(at_.size());
      tiles_.loads.push_back(tile.type);
    }
    at_.push_back(Add(tile));
    return absl::OkStatus();
  }

  absl::Status LowerReduction(const ExpressionNode& node, TileNode tile) {
    const ExpressionNode& reduced = expression_.nodes[node.arguments[0]];
    const uint32_t varies = reduced.varies | node.axes;
    const int domain = result_.DomainOf(varies);
    uint32_t rows = 0;
    for (int axis : result_.rows[domain]) rows |= 1u << axis;
    if ((node.axes & rows) != 0 && (node.axes & rows) != rows) {
      return absl::UnimplementedError(
          "program: a reduction over some axes that make rows, and not over all of them");
    }
    tile.reduction = node.reduction;
    tile.rows = (node.axes & rows) != 0;
    tile.columns = (node.axes & column_) != 0;
    // Rows are counted once for each of their axes.
    const uint32_t all = tile.rows ? varies | rows : varies;
    int argument = at_[node.arguments[0]];
    if (all != reduced.varies) argument = AddCopy(argument, all);
    // A row's numbers are within one tile.
    const bool in_tile = !tile.rows && domain != 0;
    tile.kind = in_tile ? TileNode::Kind::kReduce : TileNode::Kind::kReduceTiles;
    AddArgument(argument, &tile);
    if (!in_tile) Await(tiles_.nodes[argument].stage + 1, &tile);
    at_.push_back(Add(tile));
    return absl::OkStatus();
  }

  // Where an output has axes that its node does not vary along, a copy varies along them.
  void Store(int number) {
    const ExpressionOutput& output = expression_.outputs[number];
    const uint32_t axes = output.varies();
    int node = at_[output.node];
    if (axes != expression_.nodes[output.node].varies) node = AddCopy(node, axes);
    tiles_.stores.push_back({number, node});
    tiles_.store_types.push_back(tiles_.nodes[node].type);
  }

  TileNode Begin(DType dtype, uint32_t varies) const {
    TileNode tile;
    tile.type = {dtype, (varies & column_) == 0};
    tile.stage = result_.DomainOf(varies);
    return tile;
  }

  int Add(const TileNode& tile) {
    tiles_.nodes.push_back(tile);
    return tiles_.nodes.size() - 1;
  }

  int AddCopy(int argument, uint32_t varies) {
    TileNode copy = Begin(tiles_.nodes[argument].type.dtype, varies);
    copy.kind = TileNode::Kind::kCast;
    AddArgument(argument, &copy);
    return Add(copy);
  }

  void AddArgument(int argument, TileNode* tile) const {
    tile->arguments.push_back(argument);
    Await(tiles_.nodes[argument].stage, tile);
  }

  // Not before a phase, and one of its own domain.
  void Await(int phase, TileNode* tile) const {
    const int domains = result_.rows.size();
    while (tile->stage < phase) tile->stage += domains;
  }

  const Expression& expression_;
  uint32_t column_ = 0;
  TileExpression tiles_;
  ExpressionTiles result_;
  std::vector<int> at_;  // for each node the tiles' node
};

// Of a program that was not compiled here.
absl::Status CheckFit(const Expression& expression, const ExpressionTiles& tiles) {
  auto wrong = [](const char* what) {
    return absl::InvalidArgumentError(absl::StrCat("tile program: ", what));
  };
  const TileProgram& program = tiles.program;
  if (program.domains > static_cast<int>(tiles.rows.size())) return wrong("has other domains");
  for (const TileReduction& reduction : program.reductions) {
    if (!reduction.rows && reduction.domain != 0) return wrong("reduces a row over tiles");
  }
  for (const TileStage& stage : program.stages) {
    for (const TileInstruction& instruction : stage.code) {
      const int index = instruction.index;
      uint32_t varies = 0;
      if (instruction.kind == Code::kLoadView) return wrong("has views of what is no tensor");
      if (instruction.kind == Code::kLoad) varies = expression.nodes[tiles.loads[index]].varies;
      if (instruction.kind == Code::kStore) varies = expression.outputs[index].varies();
      const int domain = tiles.DomainOf(varies);
      if (domain != 0 && domain != stage.domain) return wrong("has a port outside of its domain");
    }
  }
  return absl::OkStatus();
}

}  // namespace

int ExpressionTiles::DomainOf(uint32_t varies) const {
  for (size_t domain = 1; domain < rows.size(); ++domain) {
    for (int axis : rows[domain]) {
      if (varies >> axis & 1) return domain;
    }
  }
  return 0;
}

TileAxes ExpressionTiles::AxesOf(uint32_t varies, const std::vector<int64_t>& sizes) const {
  return {sizes, rows[DomainOf(varies)], column};
}

absl::StatusOr<ExpressionTiles> CompileExpression(const Expression& expression) {
  const int axes = expression.axes.size();
  absl::StatusOr<ExpressionTiles> tiles = Lowering(expression, axes - 1).Run();
  for (int column = axes - 2; column >= 0 && !tiles.ok(); --column) {
    tiles = Lowering(expression, column).Run();
  }
  return tiles;
}

absl::StatusOr<ExpressionTiles> ReadExpressionTiles(const Expression& expression,
                                                    absl::string_view bytes) {
  TFMEM_ASSIGN_OR_RETURN(ExpressionTiles tiles, CompileExpression(expression));
  TFMEM_ASSIGN_OR_RETURN(TileProgram program, ParseTileProgram(bytes));
  if (program.loads != tiles.program.loads || program.stores != tiles.program.stores) {
    return absl::InvalidArgumentError("tile program: has other ports than the program");
  }
  tiles.program = std::move(program);
  TFMEM_RETURN_IF_ERROR(CheckFit(expression, tiles));
  return tiles;
}

}  // namespace tfmem
