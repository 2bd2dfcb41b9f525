#include "custom_ops/ops/cpu/expression_tiles.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "custom_ops/ops/cpu/tile_compiler.h"

namespace tfmem {
namespace {

using Kind = ExpressionNode::Kind;

// A node's phase is even if no row varies it, else odd: then a stage of one row can compute it
// once. Phases that are used become stages.
class Lowering {
 public:
  explicit Lowering(const Expression& expression)
      : expression_(expression),
        column_(expression.axes.empty() ? 0 : 1u << (expression.axes.size() - 1)),
        rows_(column_ == 0 ? 0 : column_ - 1) {}

  absl::StatusOr<ExpressionTiles> Run() {
    for (const ExpressionNode& node : expression_.nodes) {
      if (absl::Status status = Lower(node); !status.ok()) return status;
    }
    for (size_t i = 0; i < expression_.outputs.size(); ++i) Store(i);
    std::map<int, int> stages;
    for (const TileNode& node : tiles_.nodes) stages[node.stage] = 0;
    for (auto& [phase, stage] : stages) {
      stage = tiles_.one_row.size();
      tiles_.one_row.push_back(phase % 2 == 0);
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
  absl::Status Lower(const ExpressionNode& node) {
    TileNode tile;
    tile.type = {node.dtype, (node.varies & column_) == 0};
    tile.stage = (node.varies & rows_) != 0;
    tile.op = node.op;
    tile.value = node.value;
    for (int argument : node.arguments) {
      tile.arguments.push_back(at_[argument]);
      Await(tiles_.nodes[at_[argument]].stage, &tile);
    }
    switch (node.kind) {
      case Kind::kInput:
      case Kind::kPosition:
        tile.kind = TileNode::Kind::kLoad;
        tile.port = result_.loads.size();
        result_.loads.push_back(at_.size());
        tiles_.loads.push_back(tile.type);
        break;
      case Kind::kConstant:
        tile.kind = TileNode::Kind::kConstant;
        break;
      case Kind::kCast:
        tile.kind = TileNode::Kind::kCast;
        break;
      case Kind::kApply:
        tile.kind = TileNode::Kind::kApply;
        break;
      case Kind::kReduce:
        return LowerReduction(node, tile);
    }
    Add(tile);
    return absl::OkStatus();
  }

  // Not before a phase, and one of its own kind.
  static void Await(int phase, TileNode* tile) {
    if (phase > tile->stage) tile->stage = phase + (phase - tile->stage) % 2;
  }

  absl::Status LowerReduction(const ExpressionNode& node, TileNode tile) {
    const uint32_t varies = expression_.nodes[node.arguments[0]].varies;
    const uint32_t rows = node.axes & rows_;
    if (rows != 0 && (rows != rows_ || (varies & rows_) != rows_)) {
      return absl::UnimplementedError(
          "program: a reduction over some axes before the last one, and not over all of them");
    }
    tile.reduction = node.reduction;
    tile.rows = rows != 0;
    tile.columns = (node.axes & column_) != 0;
    // A row's numbers are within one tile.
    const bool in_tile = !tile.rows && (varies & rows_) != 0;
    tile.kind = in_tile ? TileNode::Kind::kReduce : TileNode::Kind::kReduceTiles;
    const bool long_mean = node.reduction == Reduction::kMean && node.dtype == DType::kInt32;
    if (long_mean) tile.arguments[0] = AddCast(tile.arguments[0], DType::kInt64);
    if (!in_tile) Await(tiles_.nodes[tile.arguments[0]].stage + 1, &tile);
    if (long_mean) {  // TensorFlow adds integers up with 64 bits
      tile.type.dtype = DType::kInt64;
      tiles_.nodes.push_back(tile);
      at_.push_back(AddCast(tiles_.nodes.size() - 1, DType::kInt32));
    } else {
      Add(tile);
    }
    return absl::OkStatus();
  }

  int AddCast(int argument, DType dtype) {
    TileNode cast = tiles_.nodes[argument];
    cast.kind = TileNode::Kind::kCast;
    cast.type.dtype = dtype;
    cast.arguments = {argument};
    tiles_.nodes.push_back(cast);
    return tiles_.nodes.size() - 1;
  }

  void Add(const TileNode& tile) {
    at_.push_back(tiles_.nodes.size());
    tiles_.nodes.push_back(tile);
  }

  // Where an output has axes that its node does not vary along, a copy varies along them.
  void Store(int number) {
    const ExpressionOutput& output = expression_.outputs[number];
    uint32_t axes = 0;
    for (int axis : output.axes) axes |= 1u << axis;
    int node = at_[output.node];
    const uint32_t varies = expression_.nodes[output.node].varies;
    const bool more_rows = (axes & rows_) != 0 && (varies & rows_) == 0;
    const bool more_columns = (axes & column_) != 0 && (varies & column_) == 0;
    if (more_rows || more_columns) {
      node = AddCast(node, tiles_.nodes[node].type.dtype);
      tiles_.nodes[node].type.scalar &= !more_columns;
      if (more_rows) tiles_.nodes[node].stage += 1;  // from an even phase
    }
    tiles_.stores.push_back({number, node});
    tiles_.store_types.push_back(tiles_.nodes[node].type);
  }

  const Expression& expression_;
  const uint32_t column_;
  const uint32_t rows_;
  TileExpression tiles_;
  ExpressionTiles result_;
  std::vector<int> at_;  // for each node the tiles' node
};

using Code = TileInstruction::Kind;

absl::Status CheckFit(const Expression& expression, const std::vector<int>& loads,
                      const TileProgram& program) {
  const uint32_t rows = expression.axes.size() < 2 ? 0 : (1u << (expression.axes.size() - 1)) - 1;
  auto wrong = [](const char* what) {
    return absl::InvalidArgumentError(absl::StrCat("tile program: ", what));
  };
  for (const TileReduction& reduction : program.reductions) {
    if (!reduction.rows && !reduction.one_row) return wrong("reduces a row over tiles");
  }
  for (const TileStage& stage : program.stages) {
    for (const TileInstruction& instruction : stage.code) {
      if (instruction.kind == Code::kLoadView) return wrong("has views of what is no tensor");
      uint32_t varies = 0;
      if (instruction.kind == Code::kLoad) {
        varies = expression.nodes[loads[instruction.index]].varies;
      } else if (instruction.kind == Code::kStore) {
        for (int axis : expression.outputs[instruction.index].axes) varies |= 1u << axis;
      }
      if (stage.one_row != ((varies & rows) == 0) && instruction.kind == Code::kStore) {
        return wrong("stores rows in a stage of one, or one row in a stage of all");
      }
      if (stage.one_row && (varies & rows) != 0) return wrong("loads rows in a stage of one");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ExpressionTiles> ReadExpressionTiles(const Expression& expression,
                                                    absl::string_view bytes) {
  absl::StatusOr<ExpressionTiles> tiles = CompileExpression(expression);
  if (!tiles.ok()) return tiles.status();
  absl::StatusOr<TileProgram> program = ParseTileProgram(bytes);
  if (!program.ok()) return program.status();
  if (program->loads != tiles->program.loads || program->stores != tiles->program.stores) {
    return absl::InvalidArgumentError("tile program: has other ports than the program");
  }
  if (absl::Status status = CheckFit(expression, tiles->loads, *program); !status.ok()) {
    return status;
  }
  tiles->program = *std::move(program);
  return tiles;
}

absl::StatusOr<ExpressionTiles> CompileExpression(const Expression& expression) {
  return Lowering(expression).Run();
}

}  // namespace tfmem
