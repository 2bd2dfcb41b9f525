#include "custom_ops/ops/step_program.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace tfmem {
namespace {

using Kind = CellNode::Kind;

bool IsLeaf(const CellNode& node) {
  return node.kind != Kind::kProduct && node.kind != Kind::kElementwise;
}

// The nodes that states and outputs depend on.
std::vector<bool> LiveNodes(const Cell& cell) {
  std::vector<bool> live(cell.nodes.size(), false);
  for (int state : cell.states) live[state] = true;
  for (const auto& output : cell.outputs) {
    for (int column : output) live[column] = true;
  }
  for (int place = cell.nodes.size() - 1; place >= 0; --place) {
    if (!live[place]) continue;
    for (int argument : cell.nodes[place].arguments) live[argument] = true;
    for (const Term& term : cell.nodes[place].terms) live[term.operand] = true;
  }
  return live;
}

// Numbers given out to keys, in the order in which they come up.
template <typename Key>
class Numbering {
 public:
  int Of(const Key& key) { return numbers_.try_emplace(key, numbers_.size()).first->second; }
  bool Has(const Key& key) const { return numbers_.count(key) > 0; }
  int size() const { return numbers_.size(); }

 private:
  std::map<Key, int> numbers_;
};

// What passes between stages, for the whole cell.
struct Exchange {
  Numbering<int> carried;  // by node
  Numbering<int> carried_scalars;
  Numbering<int> row_sums;  // by the row sum's node
  std::map<int, std::vector<int>> row_sums_of;
};

Exchange FindExchanges(const Cell& cell, const std::vector<bool>& live) {
  Exchange exchange;
  for (size_t place = 0; place < cell.nodes.size(); ++place) {
    if (!live[place]) continue;
    const CellNode& node = cell.nodes[place];
    for (const Term& term : node.terms) {
      if (cell.nodes[term.operand].kind != Kind::kState) exchange.carried.Of(term.operand);
    }
    if (node.kind == Kind::kRowSum) {
      exchange.row_sums.Of(place);
      exchange.row_sums_of[node.arguments[0]].push_back(place);
      continue;
    }
    for (int argument : node.arguments) {
      const CellNode& read = cell.nodes[argument];
      if (IsLeaf(read) || read.stage == node.stage) continue;
      (read.scalar ? exchange.carried_scalars : exchange.carried).Of(argument);
    }
  }
  return exchange;
}

// Emits one stage's code with a location of its own for each value; locations are shared after.
class StageCompiler {
 public:
  StageCompiler(const Cell& cell, const std::vector<bool>& live, int number, Exchange* exchange,
                Numbering<std::tuple<int, int, int, bool>>* blocks)
      : cell_(cell), live_(live), number_(number), exchange_(*exchange), blocks_(*blocks) {}

  void Run() {
    for (size_t place = 0; place < cell_.nodes.size(); ++place) {
      if (!live_[place] || cell_.nodes[place].stage != number_) continue;
      if (cell_.nodes[place].kind == Kind::kProduct) EmitProduct(place);
    }
    for (size_t place = 0; place < cell_.nodes.size(); ++place) {
      if (!live_[place] || cell_.nodes[place].stage != number_) continue;
      if (!IsLeaf(cell_.nodes[place])) Value(place);
      EmitStores(place);
    }
  }

  // Virtual locations: of values [0, values), of products and constants see below.
  struct Virtual {
    bool scalar = false;
    int product = -1;   // the number of a product
    int constant = -1;  // the node of a constant
  };

  Stage stage;
  std::vector<Virtual> values;

 private:
  int NewValue(bool scalar) {
    values.push_back({scalar});
    return values.size() - 1;
  }

  void EmitProduct(int place) {
    ProductJob job;
    for (const Term& term : cell_.nodes[place].terms) {
      const CellNode& operand = cell_.nodes[term.operand];
      ProductTerm read;
      read.state = operand.kind == Kind::kState;
      read.index = read.state ? operand.tensor : exchange_.carried.Of(term.operand);
      read.block = blocks_.Of({term.matrix, term.row, term.column, term.transposed});
      job.terms.push_back(read);
    }
    const int value = NewValue(false);
    values[value].product = stage.products.size();
    job.target = value;
    stage.products.push_back(std::move(job));
    computed_[place] = value;
  }

  Instruction* Emit(Instruction::Kind kind, bool scalar, int index) {
    Instruction instruction;
    instruction.kind = kind;
    instruction.scalar = scalar;
    instruction.index = index;
    stage.code.push_back(instruction);
    return &stage.code.back();
  }

  // The value of a node, brought here when it is first asked for.
  int Value(int place) {
    if (auto found = computed_.find(place); found != computed_.end()) return found->second;
    const CellNode& node = cell_.nodes[place];
    int value = -1;
    if (node.kind == Kind::kConstant) {
      value = NewValue(true);
      values[value].constant = place;
    } else if (node.kind == Kind::kElementwise && node.stage == number_) {
      value = Compute(node);
    } else {
      const auto [kind, index] = Source(place);
      value = NewValue(node.scalar);
      Instruction* load = Emit(kind, node.scalar, index);
      load->column = node.column;
      load->target = value;
    }
    computed_[place] = value;
    return value;
  }

  std::pair<Instruction::Kind, int> Source(int place) {
    const CellNode& node = cell_.nodes[place];
    switch (node.kind) {
      case Kind::kSequence:
        return {Instruction::Kind::kLoadSequence, node.tensor};
      case Kind::kInvariant:
        return {Instruction::Kind::kLoadInvariant, node.tensor};
      case Kind::kVector:
        return {Instruction::Kind::kLoadVector, node.tensor};
      case Kind::kState:
        return {Instruction::Kind::kLoadState, node.tensor};
      case Kind::kRowSum:
        return {Instruction::Kind::kLoadRowSum, exchange_.row_sums.Of(place)};
      default:
        return {Instruction::Kind::kLoadCarried,
                (node.scalar ? exchange_.carried_scalars : exchange_.carried).Of(place)};
    }
  }

  int Compute(const CellNode& node) {
    Instruction instruction;
    instruction.scalar = node.scalar;
    instruction.op = node.op;
    for (size_t i = 0; i < node.arguments.size(); ++i) {
      const int argument = node.arguments[i];
      instruction.arguments[i] = node.scalar ? Value(argument) : Wide(argument);
    }
    instruction.target = NewValue(node.scalar);
    stage.code.push_back(instruction);
    return instruction.target;
  }

  // The value of a node in each unit.
  int Wide(int place) {
    if (!cell_.nodes[place].scalar) return Value(place);
    if (auto found = widened_.find(place); found != widened_.end()) return found->second;
    int value = -1;
    if (cell_.nodes[place].kind == Kind::kConstant) {
      value = NewValue(false);
      values[value].constant = place;
    } else {
      const int scalar = Value(place);
      value = NewValue(false);
      Instruction* broadcast = Emit(Instruction::Kind::kBroadcast, false, 0);
      broadcast->arguments[0] = scalar;
      broadcast->target = value;
    }
    widened_[place] = value;
    return value;
  }

  void EmitStores(int place) {
    const bool scalar = cell_.nodes[place].scalar;
    auto store = [&](Instruction::Kind kind, int index, int column = 0) {
      const int value = Value(place);
      Instruction* instruction = Emit(kind, scalar, index);
      instruction->column = column;
      instruction->arguments[0] = value;
    };
    for (size_t i = 0; i < cell_.outputs.size(); ++i) {
      for (size_t column = 0; column < cell_.outputs[i].size(); ++column) {
        if (cell_.outputs[i][column] == place) {
          store(Instruction::Kind::kStoreOutput, i, column);
        }
      }
    }
    for (size_t i = 0; i < cell_.states.size(); ++i) {
      if (cell_.states[i] == place) store(Instruction::Kind::kStoreState, i);
    }
    Numbering<int>& carried = scalar ? exchange_.carried_scalars : exchange_.carried;
    if (carried.Has(place)) store(Instruction::Kind::kStoreCarried, carried.Of(place));
    for (int row_sum : exchange_.row_sums_of[place]) {
      store(Instruction::Kind::kStoreRowSum, exchange_.row_sums.Of(row_sum));
    }
  }

  const Cell& cell_;
  const std::vector<bool>& live_;
  const int number_;
  Exchange& exchange_;
  Numbering<std::tuple<int, int, int, bool>>& blocks_;
  std::map<int, int> computed_;  // node -> value
  std::map<int, int> widened_;   // scalar node -> value in each unit
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

struct Assignment {
  int wide_locations = 0;
  int scalar_locations = 0;
};

// Rewrites the code of a stage from values to locations. Products get negative ones here, because
// theirs begin after the tiles of all stages.
Assignment AssignLocations(const std::vector<ConstantTile>& constants,
                           const std::map<std::pair<int, bool>, int>& constant_of,
                           const std::vector<StageCompiler::Virtual>& values, Stage* stage) {
  int scalars = 0;
  for (const ConstantTile& constant : constants) scalars += constant.scalar;
  Locations wide(constants.size() - scalars);
  Locations scalar(scalars);
  std::vector<int> last_use(values.size(), -1);
  for (size_t i = 0; i < stage->code.size(); ++i) {
    for (int argument : stage->code[i].arguments) {
      if (argument >= 0) last_use[argument] = i;
    }
  }
  std::vector<int> location(values.size(), -1);
  std::vector<bool> owned(values.size(), false);
  for (size_t value = 0; value < values.size(); ++value) {
    const StageCompiler::Virtual& kind = values[value];
    if (kind.product >= 0) location[value] = -2 - kind.product;
    if (kind.constant >= 0) {
      location[value] = constants[constant_of.at({kind.constant, kind.scalar})].location;
    }
  }
  for (ProductJob& job : stage->products) job.target = location[job.target];
  for (size_t i = 0; i < stage->code.size(); ++i) {
    Instruction& instruction = stage->code[i];
    std::vector<int> dying;
    for (int& argument : instruction.arguments) {
      if (argument < 0) continue;
      if (owned[argument] && last_use[argument] == static_cast<int>(i)) {
        owned[argument] = false;
        dying.push_back(argument);
      }
      argument = location[argument];
    }
    // A target may take the place of an argument, except where the two differ in kind.
    for (int value : dying) (values[value].scalar ? scalar : wide).GiveBack(location[value]);
    if (instruction.target < 0) continue;
    const int value = instruction.target;
    location[value] = (values[value].scalar ? scalar : wide).Take();
    owned[value] = true;
    instruction.target = location[value];
  }
  return {wide.end(), scalar.end()};
}

}  // namespace

StepProgram CompileStep(const Cell& cell) {
  const std::vector<bool> live = LiveNodes(cell);
  Exchange exchange = FindExchanges(cell, live);
  Numbering<std::tuple<int, int, int, bool>> blocks;
  std::vector<StageCompiler> compiled;
  for (int number = 0; number < cell.stages(); ++number) {
    compiled.emplace_back(cell, live, number, &exchange, &blocks).Run();
  }

  StepProgram program;
  std::map<std::pair<int, bool>, int> constant_of;
  for (const StageCompiler& stage : compiled) {
    for (const StageCompiler::Virtual& value : stage.values) {
      if (value.constant < 0) continue;
      const auto [place, added] =
          constant_of.try_emplace({value.constant, value.scalar}, program.constants.size());
      if (!added) continue;
      const int location =
          std::count_if(program.constants.begin(), program.constants.end(),
                        [&](const ConstantTile& other) { return other.scalar == value.scalar; });
      program.constants.push_back({cell.nodes[value.constant].value, value.scalar, location});
    }
  }
  for (StageCompiler& stage : compiled) {
    const Assignment used =
        AssignLocations(program.constants, constant_of, stage.values, &stage.stage);
    program.wide_locations = std::max(program.wide_locations, used.wide_locations);
    program.scalar_locations = std::max(program.scalar_locations, used.scalar_locations);
    program.products = std::max<int>(program.products, stage.stage.products.size());
    program.stages.push_back(std::move(stage.stage));
  }
  auto place_product = [&](int& location) {
    if (location <= -2) location = program.wide_locations - 2 - location;
  };
  for (Stage& stage : program.stages) {
    for (ProductJob& job : stage.products) place_product(job.target);
    for (Instruction& instruction : stage.code) {
      for (int& argument : instruction.arguments) place_product(argument);
    }
  }
  program.blocks.resize(blocks.size());
  for (const CellNode& node : cell.nodes) {
    for (const Term& term : node.terms) {
      const std::tuple<int, int, int, bool> key{term.matrix, term.row, term.column,
                                                term.transposed};
      if (blocks.Has(key)) {
        program.blocks[blocks.Of(key)] = {term.matrix, term.row, term.column, term.transposed};
      }
    }
  }
  program.carried = exchange.carried.size();
  program.carried_scalars = exchange.carried_scalars.size();
  program.row_sums = exchange.row_sums.size();
  return program;
}

}  // namespace tfmem
