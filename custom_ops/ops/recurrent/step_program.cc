#include "custom_ops/ops/recurrent/step_program.h"

#include <algorithm>
#include <tuple>

#include "custom_ops/ops/cpu/tile_compiler.h"

namespace tfmem {
namespace {

using Kind = CellNode::Kind;

// The cell as an expression over tiles, node by node.
class Translation {
 public:
  Translation(const Cell& cell, DType real) : cell_(cell), real_(real) {}

  void Run() {
    expression.domains.assign(cell_.stages(), 1);  // rows of the batch
    for (const CellNode& node : cell_.nodes) expression.nodes.push_back(Translated(node));
    for (size_t i = 0; i < cell_.outputs.size(); ++i) {
      for (size_t column = 0; column < cell_.outputs[i].size(); ++column) {
        Store({StepPort::Kind::kOutput, static_cast<int>(i), static_cast<int>(column)},
              cell_.outputs[i][column]);
      }
    }
    for (size_t i = 0; i < cell_.states.size(); ++i) {
      Store({StepPort::Kind::kState, static_cast<int>(i)}, cell_.states[i]);
    }
  }

  TileExpression expression;
  std::vector<StepPort> loads;
  std::vector<StepPort> stores;

 private:
  TileNode Translated(const CellNode& node) {
    TileNode tile;
    tile.type = {real_, node.scalar};
    tile.stage = node.stage;
    tile.arguments = node.arguments;
    switch (node.kind) {
      case Kind::kSequence:
        return Load(tile, {StepPort::Kind::kSequence, node.tensor, node.column});
      case Kind::kInvariant:
        return Load(tile, {StepPort::Kind::kInvariant, node.tensor, node.column});
      case Kind::kVector:
        return Load(tile, {StepPort::Kind::kVector, node.tensor, node.column});
      case Kind::kState:
        return Load(tile, {StepPort::Kind::kState, node.tensor});
      case Kind::kConstant:
        tile.kind = TileNode::Kind::kConstant;
        tile.value = node.value;
        break;
      case Kind::kRowSum:
        tile.kind = TileNode::Kind::kReduceTiles;
        tile.columns = true;
        break;
      case Kind::kElementwise:
        tile.kind = TileNode::Kind::kApply;
        tile.op = node.op;
        break;
      case Kind::kProduct:
        tile = Load(tile, {StepPort::Kind::kProduct});  // its index is known with the live nodes
        tile.kind = TileNode::Kind::kView;
        for (const Term& term : node.terms) {
          if (cell_.nodes[term.operand].kind != Kind::kState)
            tile.arguments.push_back(term.operand);
        }
    }
    return tile;
  }

  TileNode Load(TileNode tile, StepPort port) {
    tile.kind = TileNode::Kind::kLoad;
    tile.port = loads.size();
    loads.push_back(port);
    expression.loads.push_back(tile.type);
    return tile;
  }

  void Store(StepPort port, int node) {
    expression.stores.push_back({static_cast<int>(stores.size()), node});
    stores.push_back(port);
    expression.store_types.push_back(expression.nodes[node].type);
  }

  const Cell& cell_;
  const DType real_;
};

}  // namespace

StepProgram CompileStep(const Cell& cell, DType real) {
  Translation translation(cell, real);
  translation.Run();
  CompiledTile compiled = CompileTile(translation.expression);
  StepProgram program;
  program.tile = std::move(compiled.program);
  program.loads = std::move(translation.loads);
  program.stores = std::move(translation.stores);
  for (const TileKept& kept : program.tile.kept) {
    program.carried_at.push_back(kept.type.scalar ? program.carried_scalars++ : program.carried++);
  }

  Numbering<std::tuple<int, int, int, bool>> blocks;
  program.products.resize(cell.stages());
  for (size_t place = 0; place < cell.nodes.size(); ++place) {
    const CellNode& node = cell.nodes[place];
    if (node.kind != Kind::kProduct || !compiled.live[place]) continue;
    ProductJob job;
    for (const Term& term : node.terms) {
      const CellNode& operand = cell.nodes[term.operand];
      ProductTerm read;
      read.state = operand.kind == Kind::kState;
      read.index = read.state ? operand.tensor : program.carried_at[compiled.kept[term.operand]];
      read.block = blocks.Of({term.matrix, term.row, term.column, term.transposed});
      if (read.block == static_cast<int>(program.blocks.size())) {
        program.blocks.push_back({term.matrix, term.row, term.column, term.transposed});
      }
      job.push_back(read);
    }
    std::vector<ProductJob>& jobs = program.products[node.stage];
    program.loads[translation.expression.nodes[place].port].index = jobs.size();
    jobs.push_back(std::move(job));
    program.products_at_once = std::max<int>(program.products_at_once, jobs.size());
  }
  return program;
}

}  // namespace tfmem
