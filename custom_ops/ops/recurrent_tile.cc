// The interpreter of a stage's code over one tile.
#include <algorithm>
#include <vector>

#include "custom_ops/ops/recurrent_run.h"

namespace tfmem {
namespace {

using Code = Instruction::Kind;

constexpr int kLocationsOnStack = 128;

template <typename T>
class TileInterpreter {
 public:
  using Real = RealFor<T>;

  TileInterpreter(const RecurrentRun<T>& run, const RecurrentRange& group,
                  const RecurrentRange& tile, const RecurrentStep& step)
      : run_(run),
        cut_(run.cut),
        workspace_(run.workspace),
        range_(tile),
        step_(step),
        data_(run.call.directions[tile.direction]),
        lines_(run.call.lines()),
        valid_(cut_.Valid(tile)) {
    const StepProgram& program = run.program;
    const int locations = program.wide_locations + program.products;
    if (locations + program.scalar_locations > kLocationsOnStack) {
      on_heap_.resize(locations + program.scalar_locations);
      wide_ = on_heap_.data();
    }
    scalars_ = wide_ + locations;
    for (int i = 0; i < program.wide_locations; ++i) wide_[i] = workspace_.WideTile(tile.share, i);
    for (int i = 0; i < program.products; ++i) {
      wide_[program.wide_locations + i] =
          workspace_.Product(tile.share, i) + (tile.first_row - group.first_row) * tile.width;
    }
    for (int i = 0; i < program.scalar_locations; ++i) {
      scalars_[i] = workspace_.ScalarTile(tile.share, i);
    }
  }

  void Run(const Stage& stage) {
    for (const Instruction& instruction : stage.code) {
      switch (instruction.kind) {
        case Code::kCompute:
          Compute(instruction);
          break;
        case Code::kBroadcast:
          Broadcast(instruction);
          break;
        case Code::kStoreOutput:
        case Code::kStoreState:
        case Code::kStoreCarried:
        case Code::kStoreRowSum:
          instruction.scalar ? StoreScalar(instruction) : Store(instruction);
          break;
        default:
          instruction.scalar ? LoadScalar(instruction) : Load(instruction);
      }
    }
  }

 private:
  void Compute(const Instruction& instruction) {
    const int64_t lanes = cut_.panel / 4;
    const Real** of = instruction.scalar ? scalars_ : wide_;
    Real* target = instruction.scalar ? workspace_.ScalarTile(range_.share, instruction.target)
                                      : workspace_.WideTile(range_.share, instruction.target);
    const int64_t count =
        instruction.scalar ? (range_.rows + lanes - 1) / lanes * lanes : range_.rows * range_.width;
    const Real* arguments[3];
    for (int i = 0; i < 3; ++i) {
      arguments[i] = instruction.arguments[i] < 0 ? nullptr : of[instruction.arguments[i]];
    }
    run_.kernels.compute(instruction.op, target, arguments[0], arguments[1], arguments[2], count);
    of[instruction.target] = target;
  }

  void Broadcast(const Instruction& instruction) {
    Real* target = workspace_.WideTile(range_.share, instruction.target);
    const Real* source = scalars_[instruction.arguments[0]];
    for (int64_t row = 0; row < range_.rows; ++row) {
      std::fill_n(target + row * range_.width, range_.width, source[row]);
    }
    wide_[instruction.target] = target;
  }

  void Load(const Instruction& instruction) {
    const int index = instruction.index;
    switch (instruction.kind) {
      case Code::kLoadState:
        return LoadPadded(instruction, workspace_.State(range_.direction, step_.number, index));
      case Code::kLoadCarried:
        return LoadPadded(instruction, workspace_.Carried(range_.direction, index));
      case Code::kLoadSequence: {
        const int64_t width = run_.attributes.cell.sequences[index] * cut_.units;
        const T* source = static_cast<const T*>(data_.sequences[index]);
        return LoadRows(instruction, source + lines_.At(step_.time, 0) * width, lines_.row * width);
      }
      case Code::kLoadInvariant:
        return LoadRows(instruction, static_cast<const T*>(data_.invariants[index]),
                        run_.attributes.cell.invariants[index] * cut_.units);
      default:
        return LoadRows(instruction, static_cast<const T*>(data_.vectors[index]), 0);
    }
  }

  // From a buffer of the workspace; in place, where its rows lie as those of a tile.
  void LoadPadded(const Instruction& instruction, const Real* source) {
    source += range_.first_row * cut_.stride() + range_.first_unit;
    if (range_.rows == 1 || range_.width == cut_.stride()) {
      wide_[instruction.target] = source;
      return;
    }
    Real* target = workspace_.WideTile(range_.share, instruction.target);
    for (int64_t row = 0; row < range_.rows; ++row) {
      std::copy_n(source + row * cut_.stride(), range_.width, target + row * range_.width);
    }
    wide_[instruction.target] = target;
  }

  // From a tensor; in place, if that takes neither a conversion nor padding.
  void LoadRows(const Instruction& instruction, const T* source, int64_t stride) {
    source += range_.first_row * stride + instruction.column * cut_.units + range_.first_unit;
    if constexpr (std::is_same_v<T, Real>) {
      if (range_.rows == 1 && valid_ == range_.width) {
        wide_[instruction.target] = source;
        return;
      }
    }
    Real* target = workspace_.WideTile(range_.share, instruction.target);
    for (int64_t row = 0; row < range_.rows; ++row) {
      Real* place = target + row * range_.width;
      run_.ToReal(source + row * stride, place, valid_);
      std::fill(place + valid_, place + range_.width, Real(0));
    }
    wide_[instruction.target] = target;
  }

  void LoadScalar(const Instruction& instruction) {
    Real* target = workspace_.ScalarTile(range_.share, instruction.target);
    if (instruction.kind == Code::kLoadSequence) {
      const T* source = static_cast<const T*>(data_.sequences[instruction.index]);
      for (int64_t row = 0; row < range_.rows; ++row) {
        run_.ToReal(source + lines_.At(step_.time, range_.first_row + row), target + row, 1);
      }
    } else if (instruction.kind == Code::kLoadCarried) {
      const Real* source = workspace_.CarriedScalar(range_.share, instruction.index);
      std::copy_n(source + range_.first_row, range_.rows, target);
    } else {  // a row sum: the parts in the order of the units, whoever stored them
      const Real* parts = workspace_.RowSum(range_.direction, instruction.index);
      parts += range_.first_row * cut_.tiles;
      for (int64_t row = 0; row < range_.rows; ++row) {
        Real sum = 0;
        for (int64_t i = 0; i < cut_.tiles; ++i) sum += *parts++;
        target[row] = sum;
      }
    }
    std::fill_n(target + range_.rows, cut_.panel, Real(0));
    scalars_[instruction.target] = target;
  }

  void Store(const Instruction& instruction) {
    const int index = instruction.index;
    const Real* source = wide_[instruction.arguments[0]];
    switch (instruction.kind) {
      case Code::kStoreOutput:
        return StoreOutput(instruction, source);
      case Code::kStoreRowSum:
        return StoreRowSum(source, workspace_.RowSum(range_.direction, index));
      case Code::kStoreState:
        return StorePadded(source, workspace_.State(range_.direction, step_.number + 1, index));
      default:
        return StorePadded(source, workspace_.Carried(range_.direction, index));
    }
  }

  void StoreOutput(const Instruction& instruction, const Real* source) {
    const int index = instruction.index;
    const int64_t width = run_.attributes.cell.outputs[index].size() * cut_.units;
    T* target = static_cast<T*>(data_.outputs[index]);
    target += lines_.At(step_.time, range_.first_row) * width;
    target += instruction.column * cut_.units + range_.first_unit;
    for (int64_t row = 0; row < range_.rows; ++row) {
      run_.FromReal(source + row * range_.width, target + row * lines_.row * width, valid_);
    }
  }

  // A part for each panel, so that the sum does not depend on the cut.
  void StoreRowSum(const Real* source, Real* parts) {
    parts += range_.first_row * cut_.tiles + range_.first_unit / cut_.panel;
    for (int64_t row = 0; row < range_.rows; ++row) {
      for (int64_t unit = 0; unit < range_.width; unit += cut_.panel) {
        parts[row * cut_.tiles + unit / cut_.panel] = run_.kernels.sum(
            source + row * range_.width + unit, std::min(cut_.panel, valid_ - unit));
      }
    }
  }

  void StorePadded(const Real* source, Real* target) {
    target += range_.first_row * cut_.stride() + range_.first_unit;
    for (int64_t row = 0; row < range_.rows; ++row) {
      std::copy_n(source + row * range_.width, range_.width, target + row * cut_.stride());
    }
  }

  void StoreScalar(const Instruction& instruction) {
    const Real* source = scalars_[instruction.arguments[0]];
    if (instruction.kind == Code::kStoreCarried) {
      Real* target = workspace_.CarriedScalar(range_.share, instruction.index);
      std::copy_n(source, range_.rows, target + range_.first_row);
    } else if (range_.first_unit == 0) {  // all shares of a row compute the same
      T* target = static_cast<T*>(data_.outputs[instruction.index]);
      for (int64_t row = 0; row < range_.rows; ++row) {
        run_.FromReal(source + row, target + lines_.At(step_.time, range_.first_row + row), 1);
      }
    }
  }

  const RecurrentRun<T>& run_;
  const RecurrentCut& cut_;
  const RecurrentWorkspace<Real>& workspace_;
  const RecurrentRange& range_;
  const RecurrentStep& step_;
  const RecurrentDirection& data_;
  const SequenceLines lines_;
  const int64_t valid_;
  // Where the value of each location is: in its tile, or in a tensor that it was loaded from.
  const Real* on_stack_[kLocationsOnStack];
  std::vector<const Real*> on_heap_;
  const Real** wide_ = on_stack_;
  const Real** scalars_ = nullptr;
};

}  // namespace

template <typename T>
void InterpretTile(const RecurrentRun<T>& run, const RecurrentRange& group,
                   const RecurrentRange& tile, const RecurrentStep& step, const Stage& stage) {
  TileInterpreter<T>(run, group, tile, step).Run(stage);
}

#define TFMEM_INSTANTIATE(T)                                                 \
  template void InterpretTile(const RecurrentRun<T>&, const RecurrentRange&, \
                              const RecurrentRange&, const RecurrentStep&, const Stage&);
TFMEM_INSTANTIATE(float)
TFMEM_INSTANTIATE(double)
TFMEM_INSTANTIATE(Eigen::half)
TFMEM_INSTANTIATE(Eigen::bfloat16)
#undef TFMEM_INSTANTIATE

}  // namespace tfmem
