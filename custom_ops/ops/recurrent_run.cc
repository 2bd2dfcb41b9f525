#include "custom_ops/ops/recurrent_run.h"

#include <algorithm>
#include <cstring>

#include "Eigen/Core"

namespace tfmem {
namespace {

constexpr int64_t kTileNumbers = 512;    // of a value: some ten values of a tile fill half an L1
constexpr int64_t kGroupNumbers = 4096;  // of a product
constexpr int64_t kLeastWork = 1 << 15;  // multiplications that are worth another thread
constexpr int64_t kLeastRows = 4;        // the same, if threads divide the rows

int64_t CeilOf(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Where part `index` of `parts` equal ones of `size` begins.
int64_t Begin(int64_t size, int64_t parts, int64_t index) { return size * index / parts; }

const CpuKernels<float>& KernelsOf(const InstructionSet& set, float) {
  return set.single_precision;
}
const CpuKernels<double>& KernelsOf(const InstructionSet& set, double) {
  return set.double_precision;
}

}  // namespace

RecurrentCut CutRecurrentCall(const StepProgram& program, int64_t panel, int64_t units,
                              int64_t batch, int directions, int threads) {
  RecurrentCut cut;
  cut.panel = panel;
  cut.tiles = CeilOf(units, panel);
  int64_t instructions = 0;
  for (const Stage& stage : program.stages) instructions += stage.code.size();
  const int64_t weights = units * program.blocks.size();
  const int64_t work = directions * batch * units * (weights + 2 * instructions);
  cut.threads = std::clamp<int64_t>(work / kLeastWork, 1, threads);
  const int parts = CeilOf(cut.threads, directions);
  cut.unit_parts = std::min<int64_t>(parts, cut.tiles);
  cut.row_parts = std::clamp<int64_t>(batch / kLeastRows, 1, parts / cut.unit_parts);
  cut.threads = std::min(cut.threads, directions * cut.parts());

  const int64_t rows = std::max<int64_t>(CeilOf(batch, cut.row_parts), 1);
  const int64_t width = CeilOf(cut.tiles, cut.unit_parts) * panel;
  cut.group_width = std::clamp(kTileNumbers / rows / panel * panel, panel, width);
  cut.group_rows = std::clamp<int64_t>(kGroupNumbers / cut.group_width, 1, rows);
  cut.tile_rows = std::clamp<int64_t>(kTileNumbers / cut.group_width, 1, cut.group_rows);
  return cut;
}

// A tile of values under the interpreter. Loads may point into tensors instead of copying.
template <typename T>
struct RecurrentRun<T>::Tile {
  const Range& range;
  const Step& step;
  const RecurrentDirection& data;
  const Real** wide;
  const Real** scalars;

  int64_t row(int64_t index) const { return range.first_row + index; }
};

template <typename T>
RecurrentRun<T>::RecurrentRun(const RecurrentAttributes& attributes, const StepProgram& program,
                              const RecurrentCall& call, const InstructionSet& kernels, int threads)
    : attributes_(attributes),
      program_(program),
      call_(call),
      instruction_set_(kernels),
      kernels_(KernelsOf(kernels, Real())),
      cut_(CutRecurrentCall(program, kernels_.panel, attributes.units, call.batch,
                            attributes.directions, threads)),
      units_(attributes.units) {
  const int64_t directions = attributes.directions;
  const int64_t buffer = call.batch * cut_.stride();
  panels_ = Reserve(directions * program.blocks.size() * units_ * cut_.stride());
  states_ = Reserve(2 * directions * attributes.cell.states.size() * buffer);
  carried_ = Reserve(directions * program.carried * buffer);
  carried_scalars_ = Reserve(shares() * program.carried_scalars * call.batch);
  row_sums_ = Reserve(directions * program.row_sums * call.batch * cut_.tiles);
  products_ = Reserve(shares() * program.products * cut_.group_rows * cut_.group_width);
  wide_tiles_ = Reserve(shares() * program.wide_locations * cut_.tile_rows * cut_.group_width);
  scalar_tiles_ = Reserve(shares() * program.scalar_locations * (cut_.tile_rows + cut_.panel));
}

// Whole cache lines.
template <typename T>
int64_t RecurrentRun<T>::Reserve(int64_t numbers) {
  const int64_t place = workspace_size_;
  workspace_size_ += CeilOf(numbers, 64) * 64;
  return place;
}

template <typename T>
auto RecurrentRun<T>::Panel(int direction, int64_t tile, int block) const -> Real* {
  const int64_t blocks = program_.blocks.size();
  const int64_t number = (direction * cut_.tiles + tile) * blocks + block;
  return workspace_ + panels_ + number * units_ * cut_.panel;
}

// A step reads its states from one place and writes the next ones to another, which the step after
// it reads.
template <typename T>
auto RecurrentRun<T>::StateAt(int direction, int64_t step, int state) const -> Real* {
  const int64_t states = attributes_.cell.states.size();
  const int64_t number = (direction * 2 + step % 2) * states + state;
  return workspace_ + states_ + number * call_.batch * cut_.stride();
}

template <typename T>
auto RecurrentRun<T>::Carried(int direction, int index) const -> Real* {
  const int64_t number = direction * program_.carried + index;
  return workspace_ + carried_ + number * call_.batch * cut_.stride();
}

template <typename T>
auto RecurrentRun<T>::CarriedScalar(int share, int index) const -> Real* {
  const int64_t number = share * program_.carried_scalars + index;
  return workspace_ + carried_scalars_ + number * call_.batch;
}

template <typename T>
auto RecurrentRun<T>::RowSums(int direction, int index) const -> Real* {
  const int64_t number = direction * program_.row_sums + index;
  return workspace_ + row_sums_ + number * call_.batch * cut_.tiles;
}

template <typename T>
auto RecurrentRun<T>::Products(int share, int product) const -> Real* {
  const int64_t number = share * program_.products + product;
  return workspace_ + products_ + number * cut_.group_rows * cut_.group_width;
}

template <typename T>
auto RecurrentRun<T>::WideTile(int share, int location) const -> Real* {
  const int64_t number = share * program_.wide_locations + location;
  return workspace_ + wide_tiles_ + number * cut_.tile_rows * cut_.group_width;
}

template <typename T>
auto RecurrentRun<T>::ScalarTile(int share, int location) const -> Real* {
  const int64_t number = share * program_.scalar_locations + location;
  return workspace_ + scalar_tiles_ + number * (cut_.tile_rows + cut_.panel);
}

template <typename T>
int64_t RecurrentRun<T>::phases() const {
  const int64_t stages = program_.stages.size();
  return 2 + (program_.independent() ? 1 : call_.time * stages);
}

template <typename T>
void RecurrentRun<T>::Work(int64_t phase, int share) const {
  const Range range = RangeOf(share);
  if (phase == 0) return Prepare(range);
  if (phase == phases() - 1) return Finish(range);
  const int64_t stages = program_.stages.size();
  if (!program_.independent()) {
    const Step step = StepAt((phase - 1) / stages, range.direction);
    return RunStage(range, step, program_.stages[(phase - 1) % stages]);
  }
  for (int64_t number = 0; number < call_.time; ++number) {
    for (const Stage& stage : program_.stages) {
      RunStage(range, StepAt(number, range.direction), stage);
    }
  }
}

template <typename T>
auto RecurrentRun<T>::RangeOf(int share) const -> Range {
  Range range;
  range.share = share;
  range.direction = share / cut_.parts();
  const int units_part = share % cut_.unit_parts;
  const int rows_part = share % cut_.parts() / cut_.unit_parts;
  range.first_row = Begin(call_.batch, cut_.row_parts, rows_part);
  range.rows = Begin(call_.batch, cut_.row_parts, rows_part + 1) - range.first_row;
  const int64_t first_tile = Begin(cut_.tiles, cut_.unit_parts, units_part);
  const int64_t end_tile = Begin(cut_.tiles, cut_.unit_parts, units_part + 1);
  range.first_unit = first_tile * cut_.panel;
  range.width = (end_tile - first_tile) * cut_.panel;
  return range;
}

template <typename T>
int64_t RecurrentRun<T>::Valid(const Range& range) const {
  return std::min(range.width, units_ - range.first_unit);
}

template <typename T>
auto RecurrentRun<T>::StepAt(int64_t number, int direction) const -> Step {
  const bool reverse = call_.directions[direction].reverse;
  return {number, reverse ? call_.time - 1 - number : number};
}

template <typename T>
void RecurrentRun<T>::Prepare(const Range& range) const {
  PackWeights(range);
  const RecurrentDirection& data = call_.directions[range.direction];
  for (size_t state = 0; state < data.initials.size(); ++state) {
    const T* initial = static_cast<const T*>(data.initials[state]);
    Real* target = StateAt(range.direction, 0, state);
    for (int64_t row = range.first_row; row < range.end_row(); ++row) {
      Real* padded = target + row * cut_.stride() + range.first_unit;
      ToReal(initial + row * units_ + range.first_unit, padded, Valid(range));
      std::fill(padded + Valid(range), padded + range.width, Real(0));
    }
  }
  for (const ConstantTile& constant : program_.constants) {
    const Real value = static_cast<Real>(constant.value);
    Real* tile = constant.scalar ? ScalarTile(range.share, constant.location)
                                 : WideTile(range.share, constant.location);
    std::fill_n(tile,
                constant.scalar ? cut_.tile_rows + cut_.panel : cut_.tile_rows * cut_.group_width,
                value);
  }
}

// Shares of the same units divide the panels among themselves.
template <typename T>
void RecurrentRun<T>::PackWeights(const Range& range) const {
  const int rows_part = range.share % cut_.parts() / cut_.unit_parts;
  const int64_t first = range.first_unit / cut_.panel;
  const int64_t count = range.width / cut_.panel;
  const int64_t end = first + Begin(count, cut_.row_parts, rows_part + 1);
  for (int64_t tile = first + Begin(count, cut_.row_parts, rows_part); tile < end; ++tile) {
    for (size_t block = 0; block < program_.blocks.size(); ++block) {
      PackPanel(range, program_.blocks[block], tile, Panel(range.direction, tile, block));
    }
  }
}

// panel[k, j]: the weight between unit k of the operand and unit j of the tile; 0 past the last.
template <typename T>
void RecurrentRun<T>::PackPanel(const Range& range, const WeightBlock& block, int64_t tile,
                                Real* panel) const {
  const int64_t width = cut_.panel;
  const int64_t first = tile * width;
  const int64_t valid = std::min(width, units_ - first);
  const int64_t stride = attributes_.cell.matrices[block.matrix].columns * units_;
  const T* source = static_cast<const T*>(call_.directions[range.direction].matrices[block.matrix]);
  source += block.row * units_ * stride + block.column * units_;
  if (valid < width) std::fill_n(panel, units_ * width, Real(0));
  if (!block.transposed) {
    for (int64_t k = 0; k < units_; ++k) {
      ToReal(source + k * stride + first, panel + k * width, valid);
    }
    return;
  }
  source += first * stride;
  if constexpr (std::is_same_v<T, Real>) {
    kernels_.transpose(source, stride, valid, units_, panel, width);
  } else {
    std::vector<Real> row(units_);
    for (int64_t j = 0; j < valid; ++j) {
      ToReal(source + j * stride, row.data(), units_);
      kernels_.transpose(row.data(), units_, 1, units_, panel + j, width);
    }
  }
}

template <typename T>
void RecurrentRun<T>::Finish(const Range& range) const {
  const RecurrentDirection& data = call_.directions[range.direction];
  for (size_t state = 0; state < data.finals.size(); ++state) {
    T* final = static_cast<T*>(data.finals[state]);
    const Real* source = StateAt(range.direction, call_.time, state);
    for (int64_t row = range.first_row; row < range.end_row(); ++row) {
      FromReal(source + row * cut_.stride() + range.first_unit,
               final + row * units_ + range.first_unit, Valid(range));
    }
  }
}

template <typename T>
void RecurrentRun<T>::RunStage(const Range& share, const Step& step, const Stage& stage) const {
  Range group = share;
  for (int64_t unit = share.first_unit; unit < share.end_unit(); unit += cut_.group_width) {
    group.first_unit = unit;
    group.width = std::min(cut_.group_width, share.end_unit() - unit);
    for (int64_t row = share.first_row; row < share.end_row(); row += cut_.group_rows) {
      group.first_row = row;
      group.rows = std::min(cut_.group_rows, share.end_row() - row);
      Multiply(group, step, stage);
      Range tile = group;
      for (int64_t start = row; start < group.end_row(); start += cut_.tile_rows) {
        tile.first_row = start;
        tile.rows = std::min(cut_.tile_rows, group.end_row() - start);
        Interpret(group, tile, step, stage);
      }
    }
  }
}

template <typename T>
void RecurrentRun<T>::Multiply(const Range& group, const Step& step, const Stage& stage) const {
  for (const ProductJob& job : stage.products) {
    Real* target = Products(group.share, job.target - program_.wide_locations);
    for (int64_t offset = 0; offset < group.width; offset += cut_.panel) {
      const int64_t tile = (group.first_unit + offset) / cut_.panel;
      bool accumulate = false;
      for (const ProductTerm& term : job.terms) {
        const Real* operand = term.state ? StateAt(group.direction, step.number, term.index)
                                         : Carried(group.direction, term.index);
        kernels_.multiply(operand + group.first_row * cut_.stride(), cut_.stride(), group.rows,
                          Panel(group.direction, tile, term.block), units_, target + offset,
                          group.width, accumulate);
        accumulate = true;
      }
    }
  }
}

template <typename T>
void RecurrentRun<T>::Interpret(const Range& group, const Range& range, const Step& step,
                                const Stage& stage) const {
  const int locations = program_.wide_locations + program_.products;
  constexpr int kMost = 128;
  const Real* on_stack[2 * kMost];
  std::vector<const Real*> on_heap;
  const Real** wide = on_stack;
  const Real** scalars = on_stack + kMost;
  if (std::max(locations, program_.scalar_locations) > kMost) {
    on_heap.resize(locations + program_.scalar_locations);
    wide = on_heap.data();
    scalars = wide + locations;
  }
  for (int i = 0; i < program_.wide_locations; ++i) wide[i] = WideTile(range.share, i);
  for (int i = 0; i < program_.products; ++i) {
    wide[program_.wide_locations + i] =
        Products(range.share, i) + (range.first_row - group.first_row) * range.width;
  }
  for (int i = 0; i < program_.scalar_locations; ++i) scalars[i] = ScalarTile(range.share, i);

  const Tile tile{range, step, call_.directions[range.direction], wide, scalars};
  const int64_t lanes = cut_.panel / 4;
  for (const Instruction& instruction : stage.code) {
    const int* arguments = instruction.arguments;
    auto argument = [&](const Real** of, int i) {
      return arguments[i] < 0 ? nullptr : of[arguments[i]];
    };
    switch (instruction.kind) {
      case Code::kCompute: {
        const Real** of = instruction.scalar ? scalars : wide;
        Real* target = instruction.scalar ? ScalarTile(range.share, instruction.target)
                                          : WideTile(range.share, instruction.target);
        const int64_t count =
            instruction.scalar ? CeilOf(range.rows, lanes) * lanes : range.rows * range.width;
        kernels_.compute(instruction.op, target, argument(of, 0), argument(of, 1), argument(of, 2),
                         count);
        of[instruction.target] = target;
        break;
      }
      case Code::kBroadcast: {
        Real* target = WideTile(range.share, instruction.target);
        for (int64_t row = 0; row < range.rows; ++row) {
          std::fill_n(target + row * range.width, range.width, scalars[arguments[0]][row]);
        }
        wide[instruction.target] = target;
        break;
      }
      case Code::kStoreOutput:
      case Code::kStoreState:
      case Code::kStoreCarried:
      case Code::kStoreRowSum:
        instruction.scalar ? StoreScalar(instruction, tile) : StoreTo(instruction, tile);
        break;
      default:
        instruction.scalar ? LoadScalar(instruction, tile) : Load(instruction, tile);
    }
  }
}

template <typename T>
void RecurrentRun<T>::Load(const Instruction& instruction, const Tile& tile) const {
  const Range& range = tile.range;
  const int index = instruction.index;
  Real* target = WideTile(range.share, instruction.target);
  const Real* padded = nullptr;  // of numbers that are ready to use, padded
  const T* source = nullptr;     // of a tensor
  int64_t stride = 0;            // of its rows
  switch (instruction.kind) {
    case Code::kLoadState:
      padded = StateAt(range.direction, tile.step.number, index);
      break;
    case Code::kLoadCarried:
      padded = Carried(range.direction, index);
      break;
    case Code::kLoadSequence:
      stride = attributes_.cell.sequences[index] * units_;
      source = static_cast<const T*>(tile.data.sequences[index]);
      source += tile.step.time * call_.batch * stride;
      break;
    case Code::kLoadInvariant:
      stride = attributes_.cell.invariants[index] * units_;
      source = static_cast<const T*>(tile.data.invariants[index]);
      break;
    default:
      source = static_cast<const T*>(tile.data.vectors[index]);
  }
  if (padded != nullptr) {
    padded += range.first_row * cut_.stride() + range.first_unit;
    if (range.rows == 1 || range.width == cut_.stride()) {
      tile.wide[instruction.target] = padded;
      return;
    }
    for (int64_t row = 0; row < range.rows; ++row) {
      std::memcpy(target + row * range.width, padded + row * cut_.stride(),
                  range.width * sizeof(Real));
    }
  } else {
    const int64_t valid = Valid(range);
    source += range.first_row * stride + instruction.column * units_ + range.first_unit;
    if constexpr (std::is_same_v<T, Real>) {
      if (range.rows == 1 && valid == range.width) {
        tile.wide[instruction.target] = source;
        return;
      }
    }
    for (int64_t row = 0; row < range.rows; ++row) {
      ToReal(source + row * stride, target + row * range.width, valid);
      std::fill(target + row * range.width + valid, target + (row + 1) * range.width, Real(0));
    }
  }
  tile.wide[instruction.target] = target;
}

template <typename T>
void RecurrentRun<T>::LoadScalar(const Instruction& instruction, const Tile& tile) const {
  const Range& range = tile.range;
  Real* target = ScalarTile(range.share, instruction.target);
  if (instruction.kind == Code::kLoadSequence) {
    const T* source = static_cast<const T*>(tile.data.sequences[instruction.index]);
    ToReal(source + tile.step.time * call_.batch + range.first_row, target, range.rows);
  } else if (instruction.kind == Code::kLoadCarried) {
    const Real* source = CarriedScalar(range.share, instruction.index) + range.first_row;
    std::copy_n(source, range.rows, target);
  } else {  // a row sum: the parts in the order of the units, whoever stored them
    const Real* parts = RowSums(range.direction, instruction.index);
    for (int64_t row = 0; row < range.rows; ++row) {
      Real sum = 0;
      for (int64_t i = 0; i < cut_.tiles; ++i) sum += parts[tile.row(row) * cut_.tiles + i];
      target[row] = sum;
    }
  }
  std::fill_n(target + range.rows, cut_.panel, Real(0));
  tile.scalars[instruction.target] = target;
}

template <typename T>
void RecurrentRun<T>::StoreTo(const Instruction& instruction, const Tile& tile) const {
  const Range& range = tile.range;
  const int index = instruction.index;
  const Real* source = tile.wide[instruction.arguments[0]];
  if (instruction.kind == Code::kStoreOutput) {
    const int64_t stride = attributes_.cell.outputs[index].size() * units_;
    T* target = static_cast<T*>(tile.data.outputs[index]);
    target += (tile.step.time * call_.batch + range.first_row) * stride;
    target += instruction.column * units_ + range.first_unit;
    for (int64_t row = 0; row < range.rows; ++row) {
      FromReal(source + row * range.width, target + row * stride, Valid(range));
    }
  } else if (instruction.kind == Code::kStoreRowSum) {
    for (int64_t row = 0; row < range.rows; ++row) {
      Real* parts = RowSums(range.direction, index) + tile.row(row) * cut_.tiles;
      parts += range.first_unit / cut_.panel;
      for (int64_t unit = 0; unit < range.width; unit += cut_.panel) {
        const int64_t count = std::min(cut_.panel, Valid(range) - unit);
        *parts++ = kernels_.sum(source + row * range.width + unit, count);
      }
    }
  } else {
    Real* target = instruction.kind == Code::kStoreState
                       ? StateAt(range.direction, tile.step.number + 1, index)
                       : Carried(range.direction, index);
    target += range.first_row * cut_.stride() + range.first_unit;
    for (int64_t row = 0; row < range.rows; ++row) {
      std::memcpy(target + row * cut_.stride(), source + row * range.width,
                  range.width * sizeof(Real));
    }
  }
}

template <typename T>
void RecurrentRun<T>::StoreScalar(const Instruction& instruction, const Tile& tile) const {
  const Range& range = tile.range;
  const Real* source = tile.scalars[instruction.arguments[0]];
  if (instruction.kind == Code::kStoreCarried) {
    std::copy_n(source, range.rows,
                CarriedScalar(range.share, instruction.index) + range.first_row);
  } else if (range.first_unit == 0) {  // all shares of a row compute the same
    T* target = static_cast<T*>(tile.data.outputs[instruction.index]);
    FromReal(source, target + tile.step.time * call_.batch + range.first_row, range.rows);
  }
}

template <typename T>
void RecurrentRun<T>::ToReal(const T* source, Real* target, int64_t count) const {
  if constexpr (std::is_same_v<T, Real>) {
    std::memcpy(target, source, count * sizeof(T));
  } else if constexpr (std::is_same_v<T, Eigen::half>) {
    instruction_set_.half_to_float(reinterpret_cast<const uint16_t*>(source), target, count);
  } else {
    instruction_set_.bfloat16_to_float(reinterpret_cast<const uint16_t*>(source), target, count);
  }
}

template <typename T>
void RecurrentRun<T>::FromReal(const Real* source, T* target, int64_t count) const {
  if constexpr (std::is_same_v<T, Real>) {
    std::memcpy(target, source, count * sizeof(T));
  } else if constexpr (std::is_same_v<T, Eigen::half>) {
    instruction_set_.float_to_half(source, reinterpret_cast<uint16_t*>(target), count);
  } else {
    instruction_set_.float_to_bfloat16(source, reinterpret_cast<uint16_t*>(target), count);
  }
}

template class RecurrentRun<float>;
template class RecurrentRun<double>;
template class RecurrentRun<Eigen::half>;
template class RecurrentRun<Eigen::bfloat16>;

}  // namespace tfmem
