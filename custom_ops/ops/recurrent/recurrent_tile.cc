// A tile of a recurrent step as a tile program's environment: states, sequences, products and what
// stages pass to each other.
#include <algorithm>

#include "custom_ops/ops/cpu/tile_interpreter.h"
#include "custom_ops/ops/recurrent/recurrent_run.h"

namespace tfmem {
namespace {

using Code = TileInstruction::Kind;
using Port = StepPort::Kind;

template <typename T>
class StepTile {
 public:
  static constexpr bool kOfTensors = false;
  using Real = RealFor<T>;

  StepTile(const RecurrentRun<T>& run, const RecurrentRange& group, const RecurrentRange& tile,
           const RecurrentStep& step)
      : run_(run),
        program_(run.program),
        cut_(run.cut),
        workspace_(run.workspace),
        range_(tile),
        step_(step),
        data_(run.call.directions[tile.direction]),
        lines_(run.call.lines()),
        valid_(cut_.Valid(tile)),
        product_offset_((tile.first_row - group.first_row) * tile.width) {}

  int64_t rows() const { return range_.rows; }
  int64_t columns() const { return range_.width; }

  int64_t Numbers(bool scalar) const {
    const int64_t vectors = (range_.rows + cut_.lanes - 1) / cut_.lanes;
    return scalar ? vectors * cut_.lanes : range_.rows * range_.width;
  }

  void* Tile(TileType type, int location) const {
    return type.scalar ? workspace_.ScalarTile(range_.share, location)
                       : workspace_.WideTile(range_.share, location);
  }

  const void* Load(const TileInstruction& instruction, void* tile) const {
    Real* target = static_cast<Real*>(tile);
    if (instruction.type.scalar) return LoadScalar(instruction, target);
    if (instruction.kind == Code::kLoadKept) {
      return LoadPadded(workspace_.Carried(range_.direction, Carried(instruction)), target);
    }
    const StepPort& port = program_.loads[instruction.index];
    switch (port.kind) {
      case Port::kProduct:
        return workspace_.Product(range_.share, port.index) + product_offset_;
      case Port::kState:
        return LoadPadded(workspace_.State(range_.direction, step_.number, port.index), target);
      case Port::kSequence: {
        const int64_t width = run_.attributes.cell.sequences[port.index] * cut_.units;
        const T* source = static_cast<const T*>(data_.sequences[port.index]);
        return LoadRows(port, source + lines_.At(step_.time, 0) * width, lines_.row * width,
                        target);
      }
      case Port::kInvariant:
        return LoadRows(port, static_cast<const T*>(data_.invariants[port.index]),
                        run_.attributes.cell.invariants[port.index] * cut_.units, target);
      default:
        return LoadRows(port, static_cast<const T*>(data_.vectors[port.index]), 0, target);
    }
  }

  void Store(const TileInstruction& instruction, const void* value) const {
    const Real* source = static_cast<const Real*>(value);
    if (instruction.type.scalar) return StoreScalar(instruction, source);
    if (instruction.kind == Code::kPart) {
      return StoreRowSum(source, workspace_.RowSum(range_.direction, instruction.index));
    }
    if (instruction.kind == Code::kKeep) {
      return StorePadded(source, workspace_.Carried(range_.direction, Carried(instruction)));
    }
    const StepPort& port = program_.stores[instruction.index];
    if (port.kind == Port::kOutput) return StoreOutput(port, source);
    StorePadded(source, workspace_.State(range_.direction, step_.number + 1, port.index));
  }

 private:
  int Carried(const TileInstruction& instruction) const {
    return program_.carried_at[instruction.index];
  }

  // From a buffer of the workspace; in place, where its rows lie as those of a tile.
  const Real* LoadPadded(const Real* source, Real* target) const {
    source += range_.first_row * cut_.stride() + range_.first_unit;
    if (range_.rows == 1 || range_.width == cut_.stride()) return source;
    for (int64_t row = 0; row < range_.rows; ++row) {
      std::copy_n(source + row * cut_.stride(), range_.width, target + row * range_.width);
    }
    return target;
  }

  // From a tensor; in place, if that takes neither a conversion nor padding.
  const Real* LoadRows(const StepPort& port, const T* source, int64_t stride, Real* target) const {
    source += range_.first_row * stride + port.column * cut_.units + range_.first_unit;
    if constexpr (std::is_same_v<T, Real>) {
      if (range_.rows == 1 && valid_ == range_.width) return source;
      if (range_.width == 1) {
        for (int64_t row = 0; row < range_.rows; ++row) target[row] = source[row * stride];
        return target;
      }
    }
    for (int64_t row = 0; row < range_.rows; ++row) {
      Real* place = target + row * range_.width;
      run_.ToReal(source + row * stride, place, valid_);
      std::fill(place + valid_, place + range_.width, Real(0));
    }
    return target;
  }

  const Real* LoadScalar(const TileInstruction& instruction, Real* target) const {
    if (instruction.kind == Code::kLoad) {
      const int sequence = program_.loads[instruction.index].index;
      const T* source = static_cast<const T*>(data_.sequences[sequence]);
      for (int64_t row = 0; row < range_.rows; ++row) {
        run_.ToReal(source + lines_.At(step_.time, range_.first_row + row), target + row, 1);
      }
    } else if (instruction.kind == Code::kLoadKept) {
      const Real* source = workspace_.CarriedScalar(range_.share, Carried(instruction));
      std::copy_n(source + range_.first_row, range_.rows, target);
    } else {  // a row sum: the parts in the order of the units, whichever thread stored them
      const Real* parts = workspace_.RowSum(range_.direction, instruction.index);
      parts += range_.first_row * cut_.tiles;
      for (int64_t row = 0; row < range_.rows; ++row) {
        Real sum = 0;
        for (int64_t i = 0; i < cut_.tiles; ++i) sum += *parts++;
        target[row] = sum;
      }
    }
    std::fill_n(target + range_.rows, cut_.lanes, Real(0));
    return target;
  }

  void StoreOutput(const StepPort& port, const Real* source) const {
    const int64_t width = run_.attributes.cell.outputs[port.index].size() * cut_.units;
    T* target = static_cast<T*>(data_.outputs[port.index]);
    target += lines_.At(step_.time, range_.first_row) * width;
    target += port.column * cut_.units + range_.first_unit;
    if constexpr (std::is_same_v<T, Real>) {
      if (range_.width == 1) {
        for (int64_t row = 0; row < range_.rows; ++row) {
          target[row * lines_.row * width] = source[row];
        }
        return;
      }
    }
    for (int64_t row = 0; row < range_.rows; ++row) {
      run_.FromReal(source + row * range_.width, target + row * lines_.row * width, valid_);
    }
  }

  // A part for each panel, so that the sum does not depend on the cut.
  void StoreRowSum(const Real* source, Real* parts) const {
    parts += range_.first_row * cut_.tiles + range_.first_unit / cut_.panel;
    for (int64_t row = 0; row < range_.rows; ++row) {
      for (int64_t unit = 0; unit < range_.width; unit += cut_.panel) {
        parts[row * cut_.tiles + unit / cut_.panel] = run_.kernels.sum(
            source + row * range_.width + unit, std::min(cut_.panel, valid_ - unit));
      }
    }
  }

  void StorePadded(const Real* source, Real* target) const {
    target += range_.first_row * cut_.stride() + range_.first_unit;
    if (range_.width == cut_.stride()) {
      std::copy_n(source, range_.rows * range_.width, target);
      return;
    }
    for (int64_t row = 0; row < range_.rows; ++row) {
      std::copy_n(source + row * range_.width, range_.width, target + row * cut_.stride());
    }
  }

  void StoreScalar(const TileInstruction& instruction, const Real* source) const {
    if (instruction.kind == Code::kKeep) {
      Real* target = workspace_.CarriedScalar(range_.share, Carried(instruction));
      std::copy_n(source, range_.rows, target + range_.first_row);
    } else if (range_.first_unit == 0) {  // all shares of a row compute the same
      const int output = program_.stores[instruction.index].index;
      T* target = static_cast<T*>(data_.outputs[output]);
      for (int64_t row = 0; row < range_.rows; ++row) {
        run_.FromReal(source + row, target + lines_.At(step_.time, range_.first_row + row), 1);
      }
    }
  }

  const RecurrentRun<T>& run_;
  const StepProgram& program_;
  const RecurrentCut& cut_;
  const RecurrentWorkspace<Real>& workspace_;
  const RecurrentRange& range_;
  const RecurrentStep& step_;
  const RecurrentDirection& data_;
  const SequenceLines lines_;
  const int64_t valid_;
  const int64_t product_offset_;
};

}  // namespace

template <typename T>
void InterpretTile(const RecurrentRun<T>& run, const RecurrentRange& group,
                   const RecurrentRange& tile, const RecurrentStep& step, const TileStage& stage) {
  const StepTile<T> environment(run, group, tile, step);
  TileInterpreter(run.program.tile, run.instruction_set, environment).Run(stage);
}

#define TFMEM_INSTANTIATE(T)                                                 \
  template void InterpretTile(const RecurrentRun<T>&, const RecurrentRange&, \
                              const RecurrentRange&, const RecurrentStep&, const TileStage&);
TFMEM_INSTANTIATE(float)
TFMEM_INSTANTIATE(double)
TFMEM_INSTANTIATE(Eigen::half)
TFMEM_INSTANTIATE(Eigen::bfloat16)
#undef TFMEM_INSTANTIATE

}  // namespace tfmem
