#include "custom_ops/ops/recurrent/recurrent_run.h"

#include <algorithm>
#include <variant>
#include <vector>

namespace tfmem {
namespace {

constexpr int64_t kFewSteps = 4;  // are over before packed weights repay the packing

const CpuKernels<float>& KernelsOf(const InstructionSet& set, float) {
  return set.single_precision;
}
const CpuKernels<double>& KernelsOf(const InstructionSet& set, double) {
  return set.double_precision;
}

// target (+)= factor * operand: a product of cells of one unit.
template <typename Real>
void AddMultiple(const Real* operand, Real factor, int64_t rows, bool accumulate, Real* target) {
  for (int64_t row = 0; row < rows; ++row) {
    target[row] = (accumulate ? target[row] : Real(0)) + factor * operand[row];
  }
}

}  // namespace

template <typename T>
RecurrentRun<T>::RecurrentRun(const RecurrentAttributes& attributes, const StepProgram& program,
                              const RecurrentCall& call, const InstructionSet& instruction_set,
                              int threads)
    : attributes(attributes),
      program(program),
      call(call),
      instruction_set(instruction_set),
      kernels(KernelsOf(instruction_set, Real())),
      cut(CutRecurrentCall(program, kernels.panel, attributes.units, call.batch,
                           attributes.directions, threads)),
      workspace(cut, program, attributes.cell.states.size()) {}

template <typename T>
int64_t RecurrentRun<T>::phases() const {
  const int64_t stages = program.tile.stages.size();
  return 2 + (program.independent() ? 1 : call.time * stages);
}

template <typename T>
void RecurrentRun<T>::Work(int64_t phase, int share) const {
  const RecurrentRange range = cut.RangeOf(share);
  if (phase == 0) return Prepare(range);
  if (phase == phases() - 1) return Finish(range);
  const int64_t stages = program.tile.stages.size();
  if (!program.independent()) {
    const RecurrentStep step = StepAt((phase - 1) / stages, range.direction);
    return RunStage(range, step, (phase - 1) % stages);
  }
  for (int64_t number = 0; number < call.time; ++number) {
    for (int stage = 0; stage < stages; ++stage) {
      RunStage(range, StepAt(number, range.direction), stage);
    }
  }
}

template <typename T>
RecurrentStep RecurrentRun<T>::StepAt(int64_t number, int direction) const {
  const bool reverse = call.directions[direction].reverse;
  return {number, reverse ? call.time - 1 - number : number};
}

// Packs weights, fills in initial states and constants.
template <typename T>
void RecurrentRun<T>::Prepare(const RecurrentRange& range) const {
  const RecurrentCut::Panels panels = cut.PanelsOf(range.share);
  for (int64_t tile = panels.first; tile < panels.end; ++tile) {
    for (size_t block = 0; block < program.blocks.size(); ++block) {
      if (!IsPacked(program.blocks[block], tile)) continue;
      PackPanel(range.direction, program.blocks[block], tile,
                workspace.Panel(range.direction, tile, block));
    }
  }
  const RecurrentDirection& data = call.directions[range.direction];
  const int64_t valid = cut.Valid(range);
  for (size_t state = 0; state < data.initials.size(); ++state) {
    const T* initial = static_cast<const T*>(data.initials[state]);
    Real* target = workspace.State(range.direction, 0, state);
    for (int64_t row = range.first_row; row < range.end_row(); ++row) {
      Real* padded = target + row * cut.stride() + range.first_unit;
      const int64_t given = initial == nullptr ? 0 : valid;
      if (given > 0) ToReal(initial + row * cut.units + range.first_unit, padded, given);
      std::fill(padded + given, padded + range.width, Real(0));
    }
  }
  for (const TileConstant& constant : program.tile.constants) {
    const auto as_real = [](auto value) { return static_cast<Real>(value); };
    const Real value = std::visit(as_real, constant.value);
    if (constant.type.scalar) {
      std::fill_n(workspace.ScalarTile(range.share, constant.location), cut.scalars(), value);
    } else {
      std::fill_n(workspace.WideTile(range.share, constant.location), cut.tile(), value);
    }
  }
}

template <typename T>
const T* RecurrentRun<T>::BlockAt(int direction, const WeightBlock& block) const {
  const T* matrix = static_cast<const T*>(call.directions[direction].matrices[block.matrix]);
  return matrix + block.row * cut.units * BlockStride(block) + block.column * cut.units;
}

template <typename T>
int64_t RecurrentRun<T>::BlockStride(const WeightBlock& block) const {
  return attributes.cell.matrices[block.matrix].columns * cut.units;
}

// Whether a panel is read from the workspace, not from where the matrix lies.
template <typename T>
bool RecurrentRun<T>::IsPacked(const WeightBlock& block, int64_t tile) const {
  return call.time > kFewSteps || !std::is_same_v<T, Real> || block.transposed ||
         (tile + 1) * cut.panel > cut.units;
}

template <typename T>
auto RecurrentRun<T>::WeightsOf(int direction, int block, int64_t tile) const -> Weights {
  if constexpr (std::is_same_v<T, Real>) {
    const WeightBlock& source = program.blocks[block];
    if (!IsPacked(source, tile)) {
      return {BlockAt(direction, source) + tile * cut.panel, BlockStride(source)};
    }
  }
  return {workspace.Panel(direction, tile, block), cut.panel};
}

// panel[k, j]: the weight between unit k of the operand and unit j of the tile; 0 past the last.
template <typename T>
void RecurrentRun<T>::PackPanel(int direction, const WeightBlock& block, int64_t tile,
                                Real* panel) const {
  const int64_t width = cut.panel;
  const int64_t first = tile * width;
  const int64_t valid = std::min(width, cut.units - first);
  const int64_t stride = BlockStride(block);
  const T* source = BlockAt(direction, block);
  if (valid < width) std::fill_n(panel, cut.units * width, Real(0));
  if (!block.transposed || width == 1) {
    for (int64_t k = 0; k < cut.units; ++k) {
      ToReal(source + k * stride + first, panel + k * width, valid);
    }
    return;
  }
  source += first * stride;
  if constexpr (std::is_same_v<T, Real>) {
    kernels.transpose(source, stride, valid, cut.units, panel, width);
  } else {
    std::vector<Real> rows(valid * cut.units);
    for (int64_t j = 0; j < valid; ++j) {
      ToReal(source + j * stride, rows.data() + j * cut.units, cut.units);
    }
    kernels.transpose(rows.data(), cut.units, valid, cut.units, panel, width);
  }
}

template <typename T>
void RecurrentRun<T>::Finish(const RecurrentRange& range) const {
  const RecurrentDirection& data = call.directions[range.direction];
  for (size_t state = 0; state < data.finals.size(); ++state) {
    T* final = static_cast<T*>(data.finals[state]);
    const Real* source = workspace.State(range.direction, call.time, state);
    for (int64_t row = range.first_row; row < range.end_row(); ++row) {
      FromReal(source + row * cut.stride() + range.first_unit,
               final + row * cut.units + range.first_unit, cut.Valid(range));
    }
  }
}

template <typename T>
void RecurrentRun<T>::RunStage(const RecurrentRange& share, const RecurrentStep& step,
                               int stage) const {
  RecurrentRange group = share;
  for (int64_t unit = share.first_unit; unit < share.end_unit(); unit += cut.group_width) {
    group.first_unit = unit;
    group.width = std::min(cut.group_width, share.end_unit() - unit);
    for (int64_t row = share.first_row; row < share.end_row(); row += cut.group_rows) {
      group.first_row = row;
      group.rows = std::min(cut.group_rows, share.end_row() - row);
      Multiply(group, step, stage);
      RecurrentRange tile = group;
      for (int64_t start = row; start < group.end_row(); start += cut.tile_rows) {
        tile.first_row = start;
        tile.rows = std::min(cut.tile_rows, group.end_row() - start);
        InterpretTile(*this, group, tile, step, program.tile.stages[stage]);
      }
    }
  }
}

template <typename T>
void RecurrentRun<T>::Multiply(const RecurrentRange& group, const RecurrentStep& step,
                               int stage) const {
  int product = 0;
  for (const ProductJob& job : program.products[stage]) {
    Real* target = workspace.Product(group.share, product++);
    for (int64_t offset = 0; offset < group.width; offset += cut.panel) {
      const int64_t tile = (group.first_unit + offset) / cut.panel;
      bool accumulate = false;
      for (const ProductTerm& term : job) {
        const Real* operand = term.state ? workspace.State(group.direction, step.number, term.index)
                                         : workspace.Carried(group.direction, term.index);
        const Weights weights = WeightsOf(group.direction, term.block, tile);
        if (cut.panel == 1) {
          AddMultiple(operand + group.first_row, *weights.first, group.rows, accumulate, target);
          accumulate = true;
          continue;
        }
        kernels.multiply(operand + group.first_row * cut.stride(), cut.stride(), group.rows,
                         weights.first, weights.stride, cut.units, target + offset, group.width,
                         accumulate);
        accumulate = true;
      }
    }
  }
}

template struct RecurrentRun<float>;
template struct RecurrentRun<double>;
template struct RecurrentRun<Eigen::half>;
template struct RecurrentRun<Eigen::bfloat16>;

}  // namespace tfmem
