// Runs a tile program's stage over one tile. What a tile is, where its ports come from and go to,
// and what a stage keeps for later ones, is the environment's:
//
//   void* Tile(TileType type, int location)   the memory of a location
//   int64_t rows(), columns()                 of this tile
//   int64_t Numbers(bool scalar)              that are computed of a value
//   const void* Load(const TileInstruction&, void* tile)
//                                             puts what the instruction loads into `tile`, or says
//                                             where it lies
//   void Store(const TileInstruction&, const void* value)
//   static constexpr bool kOfTensors          whether there is more to it:
//
//   const void* Constant(int number)          64 numbers that stand for a constant
//   void* Splat(TileType type, int location)  memory of a location for 64 numbers, beside its tile
//   void* Target(const TileInstruction&, void* tile)
//                                             where to put what is computed: if not into `tile`,
//                                             then where it would be stored
//   const void* Gather(const TileInstruction&, const void* offsets, void* tile)
//   bool Check(const TileInstruction&, const void* indices)
//                                             false: this tile is not worked on any further
//
// A tensor's value that is one number in all of a tile is a splat: 64 numbers stand for it.
#pragma once

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
    for (size_t i = 0; i < program.constants.size(); ++i) {
      const TileConstant& constant = program.constants[i];
      Value& value = Of(constant.type.scalar, constant.location);
      if constexpr (kOfTensors) {
        value = {environment.Constant(i), true};
      } else {
        value = {environment.Tile(constant.type, constant.location), false};
      }
    }
  }

  void Run(const TileStage& stage) {
    for (const TileInstruction& instruction : stage.code) {
      Value* target =
          instruction.target < 0 ? nullptr : &Of(instruction.type.scalar, instruction.target);
      switch (instruction.kind) {
        case Code::kCompute:
          *target = Compute(instruction);
          break;
        case Code::kCast:
          *target = Cast(instruction);
          break;
        case Code::kBroadcast:
          *target = Broadcast(instruction);
          break;
        case Code::kReduce:
          *target = {Reduce(instruction), false};
          break;
        case Code::kStore:
        case Code::kKeep:
        case Code::kPart:
          environment_.Store(instruction, Whole(instruction, instruction.type.scalar));
          break;
        case Code::kGather:
        case Code::kGatherRows:
          if constexpr (kOfTensors) {
            const bool rows = instruction.kind == Code::kGatherRows;
            const void* offsets = Whole(instruction, rows || instruction.type.scalar);
            *target = {environment_.Gather(instruction, offsets, Memory(instruction)), false};
          }
          break;
        case Code::kCheck:
          if constexpr (kOfTensors) {
            const void* indices = Whole(instruction, instruction.type.scalar);
            if (!environment_.Check(instruction, indices)) return;
          }
          break;
        default:
          *target = {environment_.Load(instruction, Memory(instruction)), false};
      }
    }
  }

 private:
  using Code = TileInstruction::Kind;

  static constexpr bool kOfTensors = Environment::kOfTensors;
  static constexpr int kLocationsOnStack = 128;
  static constexpr int64_t kSplat = 64;

  // Where the value of a location is: in its tile, or in a tensor that it was loaded from.
  struct Value {
    const void* at;
    bool splat;
  };

  Value& Of(bool scalar, int location) { return (scalar ? scalars_ : wide_)[location]; }

  // The memory of an instruction's target; none for a view.
  void* Memory(const TileInstruction& instruction) {
    if (!instruction.type.scalar && instruction.target >= wide_tiles_) return nullptr;
    return environment_.Tile(instruction.type, instruction.target);
  }

  void* Target(const TileInstruction& instruction) {
    void* tile = Memory(instruction);
    if constexpr (kOfTensors) return environment_.Target(instruction, tile);
    return tile;
  }

  void* Splat(const TileInstruction& instruction) {
    if constexpr (kOfTensors) return environment_.Splat(instruction.type, instruction.target);
    return nullptr;
  }

  // The first argument, number by number.
  const void* Whole(const TileInstruction& instruction, bool scalar) {
    const int location = instruction.arguments[0];
    const Value& value = Of(scalar, location);
    if (!kOfTensors || !value.splat) return value.at;
    const bool gathers = instruction.kind == Code::kGather || instruction.kind == Code::kGatherRows;
    const DType dtype = gathers ? instruction.from : instruction.type.dtype;
    void* tile = environment_.Tile({dtype, scalar}, location);
    const int64_t count = environment_.Numbers(scalar);
    switch (TileBytes(dtype)) {
      case 1:
        Fill<uint8_t>(value.at, 1, count, tile);
        break;
      case 4:
        Fill<int32_t>(value.at, 1, count, tile);
        break;
      default:
        Fill<int64_t>(value.at, 1, count, tile);
    }
    return tile;
  }

  Value Compute(const TileInstruction& instruction) {
    const bool scalar = instruction.type.scalar;
    const void* arguments[3] = {};
    int splats = 0;
    bool all = kOfTensors;
    for (int i = 0; i < 3 && instruction.arguments[i] >= 0; ++i) {
      const Value& value = Of(scalar, instruction.arguments[i]);
      arguments[i] = value.at;
      if constexpr (kOfTensors) {
        splats |= value.splat << i;
        all &= value.splat;
      }
    }
    if (all) splats = 0;
    void* target = all ? Splat(instruction) : Target(instruction);
    const auto& [a, b, c] = arguments;
    const int64_t count = all ? kSplat : environment_.Numbers(scalar);
    const DType type = instruction.type.dtype;
    const bool same = type == instruction.from;
    if (same && StorageOf(type) == DType::kFloat32) {
      kernels_.single_precision.compute(instruction.op, static_cast<float*>(target),
                                        static_cast<const float*>(a), static_cast<const float*>(b),
                                        static_cast<const float*>(c), count, splats);
    } else if (same && type == DType::kFloat64) {
      kernels_.double_precision.compute(
          instruction.op, static_cast<double*>(target), static_cast<const double*>(a),
          static_cast<const double*>(b), static_cast<const double*>(c), count, splats);
    } else {
      kernels_.tile.compute(instruction.op, type, instruction.from, target, a, b, c, count, splats);
    }
    Round(type, target, count);
    return {target, all};
  }

  // What has been computed in single precision, to the numbers that a half type has.
  void Round(DType type, void* values, int64_t count) {
    if (IsHalf(type)) {
      kernels_.tile.cast(DType::kFloat32, type, values, values, count);
    }
  }

  Value Cast(const TileInstruction& instruction) {
    const Value& value = Of(instruction.type.scalar, instruction.arguments[0]);
    const bool splat = kOfTensors && value.splat;
    void* target = splat ? Splat(instruction) : Target(instruction);
    kernels_.tile.cast(instruction.from, instruction.type.dtype, value.at, target,
                       splat ? kSplat : environment_.Numbers(instruction.type.scalar));
    return {target, splat};
  }

  void* Reduce(const TileInstruction& instruction) {
    void* target = Memory(instruction);
    const DType type = instruction.type.dtype;
    const int64_t rows = environment_.rows(), columns = environment_.columns();
    kernels_.tile.reduce_columns(instruction.reduction, type, Whole(instruction, false), rows,
                                 columns, target);
    if (instruction.reduction == Reduction::kMean) {
      kernels_.tile.divide(type, target, columns, rows);
    }
    Round(type, target, rows);
    return target;
  }

  template <typename Number>
  static void Fill(const void* source, int64_t rows, int64_t columns, void* target) {
    const Number* from = static_cast<const Number*>(source);
    Number* to = static_cast<Number*>(target);
    for (int64_t row = 0; row < rows; ++row) std::fill_n(to + row * columns, columns, from[row]);
  }

  Value Broadcast(const TileInstruction& instruction) {
    const Value& value = scalars_[instruction.arguments[0]];
    const bool splat = kOfTensors && (value.splat || environment_.rows() == 1);
    void* target = splat ? Splat(instruction) : Memory(instruction);
    const int64_t rows = splat ? 1 : environment_.rows();
    const int64_t columns = splat ? kSplat : environment_.columns();
    switch (TileBytes(instruction.type.dtype)) {
      case 1:
        Fill<uint8_t>(value.at, rows, columns, target);
        break;
      case 4:
        Fill<int32_t>(value.at, rows, columns, target);
        break;
      default:
        Fill<int64_t>(value.at, rows, columns, target);
    }
    return {target, splat};
  }

  const InstructionSet& kernels_;
  Environment& environment_;
  const int wide_tiles_;
  Value on_stack_[kLocationsOnStack];
  std::vector<Value> on_heap_;
  Value* wide_ = on_stack_;
  Value* scalars_ = nullptr;
};

}  // namespace tfmem
