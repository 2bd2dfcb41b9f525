#include "custom_ops/ops/cpu/tile_compiler.h"

#include <algorithm>
#include <utility>

namespace tfmem {
namespace {

using Kind = TileNode::Kind;
using Code = TileInstruction::Kind;

// Whether each stage brings the value in for itself.
bool IsLeaf(const TileNode& node) {
  return node.kind == Kind::kLoad || node.kind == Kind::kConstant ||
         node.kind == Kind::kReduceTiles;
}

bool IsComputed(const TileNode& node) {
  return node.kind == Kind::kApply || node.kind == Kind::kCast || node.kind == Kind::kReduce ||
         node.kind == Kind::kGather;
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
    if (node.kind == Kind::kReduceTiles) {
      exchange.reductions.Of(place);
      exchange.reductions_of[node.arguments[0]].push_back(place);
      continue;
    }
    for (int argument : node.arguments) {
      const TileNode& read = expression.nodes[argument];
      const bool brought = IsLeaf(read) || read.stage == node.stage;
      if (!brought || node.kind == Kind::kView) exchange.kept.Of(argument);
    }
  }
  return exchange;
}

// Emits one stage's code with a value of its own for each target; locations are given after.
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

  struct TileValue {
    TileType type;
    int constant = -1;  // the node of a constant
    bool view = false;
    bool own = false;  // a location of its own
  };

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
    if (node.kind == Kind::kConstant) {
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
    if (node.kind == Kind::kLoad) return {Code::kLoad, node.port};
    if (node.kind == Kind::kReduceTiles) {
      return {Code::kLoadReduced, exchange_.reductions.Of(place)};
    }
    if (node.kind == Kind::kView && node.stage == number_) return {Code::kLoadView, node.port};
    return {Code::kLoadKept, exchange_.kept.Of(place)};
  }

  int Compute(const TileNode& node) {
    TileInstruction instruction;
    instruction.type = node.type;
    instruction.op = node.op;
    instruction.reduction = node.reduction;
    instruction.kind = KindOf(node);
    instruction.index = node.kind == Kind::kGather ? node.port : 0;
    const bool scalar =
        (node.type.scalar && node.kind != Kind::kReduce) || instruction.kind == Code::kGatherRows;
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
      case Kind::kCast:
        return Code::kCast;
      case Kind::kReduce:
        return Code::kReduce;
      case Kind::kGather: {
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
    if (node.kind == Kind::kConstant) {
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

// Gives values that do not live at the same time the same location.
class Locations {
 public:
  explicit Locations(int first) : next_(first) {}

  int Take() {
    if (idle_.empty()) return next_++;
    const int location = idle_.back();
    idle_.pop_back();
    return location;
  }
  void GiveBack(int location) { idle_.push_back(location); }
  int end() const { return next_; }

 private:
  int next_;
  std::vector<int> idle_;
};

// The locations of one stage: wide ones, scalar ones, and views, which begin after the wide ones of
// all stages and are counted from -2 down until that is known.
class LocationAssignment {
 public:
  LocationAssignment(const std::vector<TileConstant>& constants,
                     const std::map<std::pair<int, bool>, int>& constant_of)
      : constants_(constants), constant_of_(constant_of) {
    int scalars = 0;
    for (const TileConstant& constant : constants) scalars += constant.type.scalar;
    wide_ = Locations(constants.size() - scalars);
    scalar_ = Locations(scalars);
  }

  // Rewrites the code from values to locations.
  void Run(StageCompiler* compiled) {
    values_ = &compiled->values;
    location_.assign(values_->size(), -1);
    std::vector<int> last_use(values_->size(), -1);
    std::vector<TileInstruction>& code = compiled->stage.code;
    for (size_t i = 0; i < code.size(); ++i) {
      for (int argument : code[i].arguments) {
        if (argument >= 0) last_use[argument] = i;
      }
    }
    for (size_t value = 0; value < values_->size(); ++value) {
      const StageCompiler::TileValue& kind = (*values_)[value];
      if (kind.constant >= 0) {
        location_[value] = constants_[constant_of_.at({kind.constant, kind.type.scalar})].location;
      } else if (kind.own) {
        location_[value] = Take(kind);
      }
    }
    for (size_t i = 0; i < code.size(); ++i) {
      std::vector<int> dying;
      for (int& argument : code[i].arguments) {
        if (argument < 0) continue;
        const bool dies = last_use[argument] == static_cast<int>(i);
        if (dies && (*values_)[argument].constant < 0 && !(*values_)[argument].own) {
          last_use[argument] = -1;
          dying.push_back(argument);
        }
        argument = location_[argument];
      }
      // A target may take the place of an argument whose numbers are as long: number i is written
      // after it was read.
      const int target = code[i].target;
      std::vector<int> after;
      for (int value : dying) {
        const bool as_long = target < 0 || TileBytes((*values_)[value].type.dtype) ==
                                               TileBytes((*values_)[target].type.dtype);
        as_long ? GiveBack(value) : after.push_back(value);
      }
      if (target >= 0) {
        if (location_[target] == -1) location_[target] = Take((*values_)[target]);
        code[i].target = location_[target];
      }
      for (int value : after) GiveBack(value);
    }
  }

  int wide() const { return wide_.end(); }
  int scalar() const { return scalar_.end(); }
  int views() const { return views_.end(); }

 private:
  int Take(const StageCompiler::TileValue& value) {
    if (value.view) return -2 - views_.Take();
    return (value.type.scalar ? scalar_ : wide_).Take();
  }

  void GiveBack(int value) {
    const StageCompiler::TileValue& kind = (*values_)[value];
    if (kind.view) return views_.GiveBack(-2 - location_[value]);
    (kind.type.scalar ? scalar_ : wide_).GiveBack(location_[value]);
  }

  const std::vector<TileConstant>& constants_;
  const std::map<std::pair<int, bool>, int>& constant_of_;
  const std::vector<StageCompiler::TileValue>* values_ = nullptr;
  std::vector<int> location_;
  Locations wide_{0};
  Locations scalar_{0};
  Locations views_{0};
};

// The constants that stages read, each with a location; where they are, by node and shape.
std::map<std::pair<int, bool>, int> PlaceConstants(const TileExpression& expression,
                                                   const std::vector<StageCompiler>& compiled,
                                                   std::vector<TileConstant>* constants) {
  std::map<std::pair<int, bool>, int> constant_of;
  int locations[2] = {0, 0};
  for (const StageCompiler& stage : compiled) {
    for (const StageCompiler::TileValue& value : stage.values) {
      if (value.constant < 0) continue;
      const bool scalar = value.type.scalar;
      const int number = constants->size();
      if (!constant_of.try_emplace({value.constant, scalar}, number).second) continue;
      constants->push_back(
          {expression.nodes[value.constant].value, value.type, locations[scalar]++});
    }
  }
  return constant_of;
}

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
  const auto constant_of = PlaceConstants(expression, compiled, &program.constants);
  for (StageCompiler& stage : compiled) {
    LocationAssignment locations(program.constants, constant_of);
    locations.Run(&stage);
    program.wide_locations = std::max(program.wide_locations, locations.wide());
    program.scalar_locations = std::max(program.scalar_locations, locations.scalar());
    program.views = std::max(program.views, locations.views());
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
