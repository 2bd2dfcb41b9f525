// Runs a tile program's stage over one tile. What a tile is, where its ports come from and go to,
// and what a stage keeps for later ones, is the environment's:
//
//   void* Tile(TileType type, int location)   the memory of a location
//   int64_t rows(), columns()                 of this tile
//   int64_t Numbers(bool scalar)              that are computed of a value: whole vectors, so maybe
//                                             more than there are
//   const void* Load(const TileInstruction&, void* tile)
//                                             puts what the instruction loads into `tile`, or says
//                                             where it lies
//   void Store(const TileInstruction&, const void* value)
#ifndef TFMEM_CUSTOM_OPS_OPS_CPU_TILE_INTERPRETER_H_
#define TFMEM_CUSTOM_OPS_OPS_CPU_TILE_INTERPRETER_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "custom_ops/ops/cpu/cpu_kernels.h"
#include "custom_ops/ops/cpu/tile_program.h"

namespace tfmem {

template <typename Environment>
class TileInterpreter {
 public:
  TileInterpreter(const TileProgram& program, const InstructionSet& kernels,
                  Environment& environment)
      : kernels_(kernels), environment_(environment), wide_tiles_(program.wide_locations) {
    const int wide = program.wide_locations + program.views;
    if (wide + program.scalar_locations > kLocationsOnStack) {
      on_heap_.resize(wide + program.scalar_locations);
      wide_ = on_heap_.data();
    }
    scalars_ = wide_ + wide;
    for (const TileConstant& constant : program.constants) {
      const int location = constant.location;
      Place(constant.type.scalar)[location] = environment.Tile(constant.type, location);
    }
  }

  void Run(const TileStage& stage) {
    for (const TileInstruction& instruction : stage.code) {
      const void** of = Place(instruction.type.scalar);
      const int target = instruction.target;
      switch (instruction.kind) {
        case Code::kCompute:
          of[target] = Compute(instruction);
          break;
        case Code::kCast:
          of[target] = Cast(instruction);
          break;
        case Code::kBroadcast:
          of[target] = Broadcast(instruction);
          break;
        case Code::kReduce:
          of[target] = Reduce(instruction);
          break;
        case Code::kStore:
        case Code::kKeep:
        case Code::kPart:
          environment_.Store(instruction, of[instruction.arguments[0]]);
          break;
        default:
          of[target] = environment_.Load(instruction, Memory(instruction));
      }
    }
  }

 private:
  using Code = TileInstruction::Kind;

  static constexpr int kLocationsOnStack = 128;

  const void** Place(bool scalar) { return scalar ? scalars_ : wide_; }

  // Of an instruction's target; none for a view.
  void* Memory(const TileInstruction& instruction) {
    if (!instruction.type.scalar && instruction.target >= wide_tiles_) return nullptr;
    return environment_.Tile(instruction.type, instruction.target);
  }

  void* Compute(const TileInstruction& instruction) {
    void* target = Memory(instruction);
    const void** of = Place(instruction.type.scalar);
    const void* arguments[3];
    for (int i = 0; i < 3; ++i) {
      arguments[i] = instruction.arguments[i] < 0 ? nullptr : of[instruction.arguments[i]];
    }
    const auto& [a, b, c] = arguments;
    const int64_t count = environment_.Numbers(instruction.type.scalar);
    const DType type = instruction.type.dtype;
    const bool same = type == instruction.from;
    if (same && StorageOf(type) == DType::kFloat32) {
      kernels_.single_precision.compute(instruction.op, static_cast<float*>(target),
                                        static_cast<const float*>(a), static_cast<const float*>(b),
                                        static_cast<const float*>(c), count);
    } else if (same && type == DType::kFloat64) {
      kernels_.double_precision.compute(
          instruction.op, static_cast<double*>(target), static_cast<const double*>(a),
          static_cast<const double*>(b), static_cast<const double*>(c), count);
    } else {
      kernels_.tile.compute(instruction.op, type, instruction.from, target, a, b, c, count);
    }
    Round(type, target, count);
    return target;
  }

  // What has been computed in single precision, to the numbers that a half type has.
  void Round(DType type, void* values, int64_t count) {
    if (IsHalf(type)) {
      kernels_.tile.cast(DType::kFloat32, type, values, values, count);
    }
  }

  void* Cast(const TileInstruction& instruction) {
    void* target = Memory(instruction);
    kernels_.tile.cast(instruction.from, instruction.type.dtype,
                       Place(instruction.type.scalar)[instruction.arguments[0]], target,
                       environment_.Numbers(instruction.type.scalar));
    return target;
  }

  void* Reduce(const TileInstruction& instruction) {
    void* target = Memory(instruction);
    const DType type = instruction.type.dtype;
    const int64_t rows = environment_.rows(), columns = environment_.columns();
    kernels_.tile.reduce_columns(instruction.reduction, type, wide_[instruction.arguments[0]], rows,
                                 columns, target);
    if (instruction.reduction == Reduction::kMean) {
      kernels_.tile.divide(type, target, columns, rows);
    }
    Round(type, target, rows);
    return target;
  }

  template <typename Number>
  void Fill(const void* source, void* target) {
    const Number* from = static_cast<const Number*>(source);
    Number* to = static_cast<Number*>(target);
    const int64_t rows = environment_.rows(), columns = environment_.columns();
    for (int64_t row = 0; row < rows; ++row) std::fill_n(to + row * columns, columns, from[row]);
  }

  void* Broadcast(const TileInstruction& instruction) {
    void* target = Memory(instruction);
    const void* source = scalars_[instruction.arguments[0]];
    switch (TileBytes(instruction.type.dtype)) {
      case 1:
        Fill<uint8_t>(source, target);
        break;
      case 4:
        Fill<float>(source, target);
        break;
      default:
        Fill<double>(source, target);
    }
    return target;
  }

  const InstructionSet& kernels_;
  Environment& environment_;
  const int wide_tiles_;
  // Where the value of each location is: in its tile, or in a tensor that it was loaded from.
  const void* on_stack_[kLocationsOnStack];
  std::vector<const void*> on_heap_;
  const void** wide_ = on_stack_;
  const void** scalars_ = nullptr;
};

}  // namespace tfmem

#endif  // TFMEM_CUSTOM_OPS_OPS_CPU_TILE_INTERPRETER_H_
