#include "custom_ops/ops/cpu/tile_compiler.h"

#include <algorithm>
#include <utility>

#include "custom_ops/ops/cpu/tile_locations.h"

namespace tfmem {
namespace {

using TileKind = TileNode::Kind;
using Code = TileInstruction::Kind;

// Whether each stage brings the value in for itself.
bool IsLeaf(const TileNode& node) {
  return node.kind == TileKind::kLoad || node.kind == TileKind::kConstant ||
         node.kind == TileKind::kReduceTiles;
}

bool IsComputed(const TileNode& node) {
  return node.kind == TileKind::kApply || node.kind == TileKind::kCast ||
         node.kind == TileKind::kReduce || node.kind == TileKind::kGather;
}

// The nodes that stores and reductions depend on.
std::vector<bool> LiveNodes(const TileExpression& expression) {
  std::vector<bool> live(expression.nodes.size(), false);
  for (const TileStore& store : expression.stores) live[store.node] = true;
  for (const TileSink& part : expression.parts) live[part.node] = true;
  for (const TileSink& check : expression.checks) live[check.node] = true;
  for (int place = expression.nodes.size() - 1; place >= 0; --place) {
    if (!live[place]) continue;
    for (int argument : expression.nodes[place].arguments) live[argument] = true;
  }
  return live;
}

// What passes between stages, by node.
struct Exchange {
  Numbering<int> kept;
  Numbering<int> reductions;
  std::map<int, std::vector<int>> reductions_of;  // by the node that is reduced
};

Exchange FindExchanges(const TileExpression& expression, const std::vector<bool>& live) {
  Exchange exchange;
  for (size_t place = 0; place < expression.nodes.size(); ++place) {
    if (!live[place]) continue;
    const TileNode& node = expression.nodes[place];
    if (node.kind == TileKind::kReduceTiles) {
      exchange.reductions.Of(place);
      exchange.reductions_of[node.arguments[0]].push_back(place);
      continue;
    }
    for (int argument : node.arguments) {
      const TileNode& read = expression.nodes[argument];
      const bool brought = IsLeaf(read) || read.stage == node.stage;
      if (!brought || node.kind == TileKind::kView) exchange.kept.Of(argument);
    }
  }
  return exchange;
}

// Emits one stage's code with a new value for each target; locations are given after.
class StageCompiler {
 public:
  StageCompiler(const TileExpression& expression, const std::vector<bool>& live, int number,
                Exchange* exchange)
      : expression_(expression),
        nodes_(expression.nodes),
        live_(live),
        number_(number),
        exchange_(*exchange) {
    stage.domain = expression.domains[number];
  }

  void Run() {
    for (size_t place = 0; place < nodes_.size(); ++place) {
      if (!live_[place] || nodes_[place].stage != number_) continue;
      if (!IsLeaf(nodes_[place])) Value(place);
      EmitStores(place);
    }
  }

  TileStage stage;
  std::vector<TileValue> values;

 private:
  int NewValue(TileType type) {
    values.push_back({type});
    return values.size() - 1;
  }

  TileInstruction* Emit(Code kind, TileType type, int index = 0) {
    TileInstruction instruction;
    instruction.kind = kind;
    instruction.type = type;
    instruction.from = type.dtype;
    instruction.index = index;
    stage.code.push_back(instruction);
    return &stage.code.back();
  }

  // The value of a node, brought here when it is first asked for.
  int Value(int place) {
    if (auto found = computed_.find(place); found != computed_.end()) return found->second;
    const TileNode& node = nodes_[place];
    int value = -1;
    if (node.kind == TileKind::kConstant) {
      value = NewValue(node.type);
      values[value].constant = place;
    } else if (IsComputed(node) && node.stage == number_) {
      value = Compute(node);
    } else {
      const auto [kind, index] = Source(place);
      value = NewValue(node.type);
      values[value].view = kind == Code::kLoadView;
      values[value].own = node.same_rows;
      TileInstruction* load = Emit(kind, node.type, index);
      load->target = value;
      load->same_rows = node.same_rows;
    }
    computed_[place] = value;
    return value;
  }

  std::pair<Code, int> Source(int place) {
    const TileNode& node = nodes_[place];
    if (node.kind == TileKind::kLoad) return {Code::kLoad, node.port};
    if (node.kind == TileKind::kReduceTiles) {
      return {Code::kLoadReduced, exchange_.reductions.Of(place)};
    }
    if (node.kind == TileKind::kView && node.stage == number_) return {Code::kLoadView, node.port};
    return {Code::kLoadKept, exchange_.kept.Of(place)};
  }

  int Compute(const TileNode& node) {
    TileInstruction instruction;
    instruction.type = node.type;
    instruction.op = node.op;
    instruction.reduction = node.reduction;
    instruction.kind = KindOf(node);
    instruction.index = node.kind == TileKind::kGather ? node.port : 0;
    const bool scalar = (node.type.scalar && node.kind != TileKind::kReduce) ||
                        instruction.kind == Code::kGatherRows;
    for (size_t i = 0; i < node.arguments.size(); ++i) {
      const int argument = node.arguments[i];
      instruction.arguments[i] = scalar ? Value(argument) : Wide(argument);
    }
    // A select's condition is its first argument: what it selects has the type of the result.
    instruction.from = nodes_[node.arguments[0]].type.dtype;
    instruction.target = NewValue(node.type);
    stage.code.push_back(instruction);
    return instruction.target;
  }

  Code KindOf(const TileNode& node) const {
    switch (node.kind) {
      case TileKind::kCast:
        return Code::kCast;
      case TileKind::kReduce:
        return Code::kReduce;
      case TileKind::kGather: {
        const bool rows = nodes_[node.arguments[0]].type.scalar && !node.type.scalar;
        return rows ? Code::kGatherRows : Code::kGather;
      }
      default:
        return Code::kCompute;
    }
  }

  // The value of a node in each column.
  int Wide(int place) {
    const TileNode& node = nodes_[place];
    if (!node.type.scalar) return Value(place);
    if (auto found = widened_.find(place); found != widened_.end()) return found->second;
    const TileType type{node.type.dtype, false};
    int value = -1;
    if (node.kind == TileKind::kConstant) {
      value = NewValue(type);
      values[value].constant = place;
    } else {
      const int scalar = Value(place);
      value = NewValue(type);
      TileInstruction* broadcast = Emit(Code::kBroadcast, type);
      broadcast->arguments[0] = scalar;
      broadcast->target = value;
    }
    widened_[place] = value;
    return value;
  }

  void EmitStores(int place) {
    for (const TileSink& check : expression_.checks) {
      if (check.node == place) EmitStore(Code::kCheck, check.number, Value(place));
    }
    for (const TileStore& store : expression_.stores) {
      if (store.node == place) EmitStore(Code::kStore, store.port, Value(place));
    }
    for (const TileSink& part : expression_.parts) {
      if (part.node != place) continue;
      const bool columns = expression_.reductions[part.number].columns;
      EmitStore(Code::kPart, part.number, columns ? Wide(place) : Value(place));
    }
    if (exchange_.kept.Has(place)) EmitStore(Code::kKeep, exchange_.kept.Of(place), Value(place));
    for (int reduction : exchange_.reductions_of[place]) {
      const int value = nodes_[reduction].columns ? Wide(place) : Value(place);
      EmitStore(Code::kPart, exchange_.reductions.Of(reduction), value);
    }
  }

  void EmitStore(Code kind, int index, int value) {
    Emit(kind, values[value].type, index)->arguments[0] = value;
  }

  const TileExpression& expression_;
  const std::vector<TileNode>& nodes_;
  const std::vector<bool>& live_;
  const int number_;
  Exchange& exchange_;
  std::map<int, int> computed_;  // node -> value
  std::map<int, int> widened_;   // scalar node -> value in each column
};

}  // namespace

CompiledTile CompileTile(const TileExpression& expression) {
  CompiledTile result;
  result.live = LiveNodes(expression);
  Exchange exchange = FindExchanges(expression, result.live);
  std::vector<StageCompiler> compiled;
  for (size_t number = 0; number < expression.domains.size(); ++number) {
    compiled.emplace_back(expression, result.live, number, &exchange).Run();
  }

  TileProgram& program = result.program;
  for (int domain : expression.domains) program.domains = std::max(program.domains, domain + 1);
  program.loads = expression.loads;
  program.stores = expression.store_types;
  std::vector<const std::vector<TileValue>*> values;
  for (const StageCompiler& stage : compiled) values.push_back(&stage.values);
  const ConstantNumbers constant_of = PlaceConstants(expression, values, &program.constants);
  for (StageCompiler& stage : compiled) {
    AssignLocations(stage.values, constant_of, &stage.stage, &program);
    program.stages.push_back(std::move(stage.stage));
  }
  auto place_view = [&](int& location) {
    if (location <= -2) location = program.wide_locations - 2 - location;
  };
  for (TileStage& stage : program.stages) {
    for (TileInstruction& instruction : stage.code) {
      place_view(instruction.target);
      for (int& argument : instruction.arguments) place_view(argument);
    }
  }

  program.kept.resize(exchange.kept.size());
  program.reductions = expression.reductions;
  program.reductions.resize(program.reductions.size() + exchange.reductions.size());
  result.kept.assign(expression.nodes.size(), -1);
  for (size_t place = 0; place < expression.nodes.size(); ++place) {
    const TileNode& node = expression.nodes[place];
    if (exchange.kept.Has(place)) {
      result.kept[place] = exchange.kept.Of(place);
      program.kept[result.kept[place]] = {node.type, expression.domains[node.stage]};
    }
    if (exchange.reductions.Has(place)) {
      const TileNode& reduced = expression.nodes[node.arguments[0]];
      TileType type = reduced.type;
      if (node.columns) type.scalar = false;
      program.reductions[exchange.reductions.Of(place)] = {
          node.reduction, type, node.rows, node.columns, expression.domains[reduced.stage]};
    }
  }
  return result;
}

}  // namespace tfmem
