// What has to hold of a tile program that is compiled from a program over tensors.
#pragma once

#include <map>
#include <set>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "custom_ops/ops/cpu/tile_program.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace tile_check {

using Code = TileInstruction::Kind;

template <typename... Parts>
absl::Status Wrong(Parts... parts) {
  return absl::InvalidArgumentError(absl::StrCat("tile program: ", parts...));
}

inline std::string Text(TileType type) {
  return absl::StrCat(type.scalar ? "scalar " : "wide ", NameOf(type.dtype));
}

// What a location holds: nothing, or a value of a type.
struct Held {
  bool any = false;
  DType dtype = DType::kFloat32;
};

class Checker {
 public:
  explicit Checker(const TileProgram& program) : program_(program) {}

  absl::Status Run() {
    TFMEM_RETURN_IF_ERROR(CheckLocations());
    TFMEM_RETURN_IF_ERROR(CheckReductions());
    for (size_t i = 0; i < program_.stages.size(); ++i) TFMEM_RETURN_IF_ERROR(CheckStage(i));
    for (size_t port = 0; port < program_.stores.size(); ++port) {
      if (stored_.count(port) == 0) return Wrong("nothing is stored in port ", port);
    }
    return absl::OkStatus();
  }

 private:
  absl::Status CheckLocations() {
    constants_[0].resize(program_.wide_locations + program_.views);
    constants_[1].resize(program_.scalar_locations);
    for (const TileConstant& constant : program_.constants) {
      const int end = constant.type.scalar ? program_.scalar_locations : program_.wide_locations;
      if (constant.location >= end) {
        return Wrong("a constant is at ", constant.location, " of ", end, " locations");
      }
      Held& held = constants_[constant.type.scalar][constant.location];
      if (held.any) return Wrong("two constants are at location ", constant.location);
      held = {true, constant.type.dtype};
    }
    return absl::OkStatus();
  }

  absl::Status CheckReductions() const {
    for (const TileReduction& reduction : program_.reductions) {
      if (!Takes(reduction.reduction, reduction.type.dtype)) {
        return Wrong("a ", NameOf(reduction.reduction), " of ", Text(reduction.type));
      }
      if (!reduction.rows && !reduction.columns) return Wrong("a reduction over no axis");
      if (reduction.columns && reduction.type.scalar) {
        return Wrong("a reduction over the columns of a scalar");
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckStage(int number) {
    stage_ = number;
    held_[0] = constants_[0];
    held_[1] = constants_[1];
    for (const TileInstruction& instruction : program_.stages[number].code) {
      TFMEM_RETURN_IF_ERROR(CheckInstruction(instruction));
    }
    return absl::OkStatus();
  }

  absl::Status CheckInstruction(const TileInstruction& instruction) {
    TFMEM_RETURN_IF_ERROR(CheckArguments(instruction));
    const TileType type = instruction.type;
    switch (instruction.kind) {
      case Code::kLoad:
      case Code::kLoadView:
        TFMEM_RETURN_IF_ERROR(CheckPort(program_.loads, instruction));
        break;
      case Code::kLoadKept:
        TFMEM_RETURN_IF_ERROR(CheckKept(instruction));
        break;
      case Code::kLoadReduced:
        TFMEM_RETURN_IF_ERROR(CheckReduced(instruction));
        break;
      case Code::kGather:
      case Code::kGatherRows:
        if (instruction.from != DType::kInt64) {
          return Wrong("a gather at ", NameOf(instruction.from));
        }
        TFMEM_RETURN_IF_ERROR(CheckPort(program_.loads, instruction));
        if (type.scalar && instruction.kind == Code::kGatherRows) {
          return Wrong("a gather of rows to ", Text(type));
        }
        break;
      case Code::kBroadcast:
        if (type.scalar) return Wrong("a broadcast to ", Text(type));
        break;
      case Code::kCompute:
        TFMEM_RETURN_IF_ERROR(CheckOp(instruction));
        break;
      case Code::kCast:
        break;
      case Code::kReduce:
        if (!type.scalar || !Takes(instruction.reduction, type.dtype)) {
          return Wrong("a ", NameOf(instruction.reduction), " to ", Text(type));
        }
        break;
      case Code::kStore:
        TFMEM_RETURN_IF_ERROR(CheckPort(program_.stores, instruction));
        if (!stored_.insert(instruction.index).second) {
          return Wrong("port ", instruction.index, " is stored a second time");
        }
        break;
      case Code::kKeep:
        if (!Gives(program_.kept, instruction, &kept_)) {
          return Wrong("value ", instruction.index, " cannot be kept as ", Text(type));
        }
        break;
      case Code::kPart:
        if (!Gives(program_.reductions, instruction, &parts_)) {
          return Wrong("reduction ", instruction.index, " does not take ", Text(type));
        }
        break;
      case Code::kCheck:
        if (type.dtype != DType::kInt64 || instruction.index >= program_.checks) {
          return Wrong("check ", instruction.index, " of ", program_.checks, " of ", Text(type));
        }
    }
    return Write(instruction);
  }

  // Each argument is there, is of the type that the instruction takes, and there are no others.
  absl::Status CheckArguments(const TileInstruction& instruction) const {
    const int count = Arguments(instruction);
    for (int i = 0; i < 3; ++i) {
      const int argument = instruction.arguments[i];
      if (i >= count) {
        if (argument != -1) return Wrong("an instruction has an argument too many");
        continue;
      }
      const bool other_shape = instruction.kind == Code::kBroadcast ||
                               instruction.kind == Code::kReduce ||
                               instruction.kind == Code::kGatherRows;
      const std::vector<Held>& held = held_[instruction.type.scalar != other_shape];
      if (argument < 0 || argument >= static_cast<int>(held.size()) || !held[argument].any) {
        return Wrong("location ", argument, " is read where nothing is");
      }
      const DType dtype =
          i == 0 && TakesOther(instruction) ? instruction.from : Operand(instruction);
      if (held[argument].dtype != dtype) {
        return Wrong("location ", argument, " holds ", NameOf(held[argument].dtype),
                     " and is read as ", NameOf(dtype));
      }
    }
    return absl::OkStatus();
  }

  static int Arguments(const TileInstruction& instruction) {
    if (instruction.kind == Code::kCompute) return InfoOf(instruction.op).arguments;
    return instruction.kind <= Code::kLoadReduced ? 0 : 1;
  }

  static bool TakesOther(const TileInstruction& instruction) {
    return instruction.kind == Code::kCast || instruction.kind == Code::kCompute ||
           instruction.kind == Code::kGather || instruction.kind == Code::kGatherRows;
  }

  // The dtype of the arguments after the first, and of the first if it has no other.
  static DType Operand(const TileInstruction& instruction) {
    const bool compares = instruction.kind == Code::kCompute && InfoOf(instruction.op).comparison;
    return compares ? instruction.from : instruction.type.dtype;
  }

  absl::Status CheckOp(const TileInstruction& instruction) const {
    const ElementwiseInfo& info = InfoOf(instruction.op);
    const DType type = instruction.type.dtype, from = instruction.from;
    bool right = Takes(info, Operand(instruction));
    if (instruction.op == Elementwise::kSelect) {
      right &=
          from == DType::kBool || (from == type && type != DType::kInt32 && type != DType::kInt64);
    } else if (info.comparison) {
      // A cell has one dtype: there a comparison gives 1 and 0.
      right &= type == DType::kBool || (type == from && StorageOf(type) <= DType::kFloat64);
    } else {
      right &= from == type;
    }
    if (right) return absl::OkStatus();
    return Wrong(info.name, " of ", NameOf(from), " that gives ", NameOf(type));
  }

  template <typename List>
  static bool HasIndex(const List& list, const TileInstruction& instruction) {
    return instruction.index < static_cast<int>(list.size());
  }

  // Whether a kept value or a reduction takes what this stage gives it, and nothing has before.
  template <typename List>
  bool Gives(const List& list, const TileInstruction& instruction, std::map<int, int>* given) {
    if (!HasIndex(list, instruction)) return false;
    const auto& takes = list[instruction.index];
    return takes.type == instruction.type && takes.domain == domain() &&
           given->try_emplace(instruction.index, stage_).second;
  }

  absl::Status CheckPort(const std::vector<TileType>& ports,
                         const TileInstruction& instruction) const {
    if (!HasIndex(ports, instruction)) {
      return Wrong("refers to port ", instruction.index, " where there are ", ports.size());
    }
    const TileType port = ports[instruction.index];
    if (port == instruction.type) return absl::OkStatus();
    return Wrong("port ", instruction.index, " is ", Text(port), " and is used as ",
                 Text(instruction.type));
  }

  absl::Status CheckKept(const TileInstruction& instruction) const {
    const auto kept = kept_.find(instruction.index);
    if (kept == kept_.end() || kept->second == stage_) {
      return Wrong("value ", instruction.index, " is read before it is kept");
    }
    const TileKept& read = program_.kept[instruction.index];
    if (read.type == instruction.type && (read.domain == 0 || read.domain == domain())) {
      return absl::OkStatus();
    }
    return Wrong("value ", instruction.index, " is read as ", Text(instruction.type));
  }

  absl::Status CheckReduced(const TileInstruction& instruction) const {
    const auto parts = parts_.find(instruction.index);
    if (parts == parts_.end() || parts->second == stage_) {
      return Wrong("reduction ", instruction.index, " is read before its parts are there");
    }
    const TileReduction& read = program_.reductions[instruction.index];
    const TileType type{read.type.dtype, read.type.scalar || read.columns};
    const bool fits = read.rows || read.domain == 0 || read.domain == domain();
    if (type == instruction.type && fits) return absl::OkStatus();
    return Wrong("reduction ", instruction.index, " is read as ", Text(instruction.type));
  }

  absl::Status Write(const TileInstruction& instruction) {
    const int target = instruction.target;
    if (instruction.kind >= Code::kStore) {
      return target == -1 ? absl::OkStatus() : Wrong("a store has a target");
    }
    const bool scalar = instruction.type.scalar, view = instruction.kind == Code::kLoadView;
    if (view && scalar) return Wrong("a scalar is loaded as a view");
    const int first = view ? program_.wide_locations : 0;
    const int end = scalar ? program_.scalar_locations
                    : view ? program_.wide_locations + program_.views
                           : program_.wide_locations;
    if (target < first || target >= end) {
      return Wrong("writes location ", target, " of ", first, " to ", end - 1);
    }
    if (constants_[scalar][target].any) return Wrong("writes over a constant at ", target);
    for (int argument : instruction.arguments) {
      const bool same = instruction.kind == Code::kCompute || instruction.kind == Code::kCast;
      if (same && argument == target &&
          TileBytes(held_[scalar][target].dtype) != TileBytes(instruction.type.dtype)) {
        return Wrong("writes location ", target, " before all of it is read");
      }
    }
    held_[scalar][target] = {true, instruction.type.dtype};
    return absl::OkStatus();
  }

  int domain() const { return program_.stages[stage_].domain; }

  const TileProgram& program_;
  int stage_ = 0;
  std::vector<Held> constants_[2];  // wide, scalar
  std::vector<Held> held_[2];
  std::set<int> stored_;
  std::map<int, int> kept_;   // by value, the stage that keeps it
  std::map<int, int> parts_;  // by reduction, the stage that gives the parts
};

}  // namespace tile_check

// What has to hold of a program before it runs: locations, ports and arguments are in range and of
// the types that their readers take, and nothing is read before it is written. InvalidArgument
// names what does not.
inline absl::Status CheckTileProgram(const TileProgram& program) {
  return tile_check::Checker(program).Run();
}

}  // namespace tfmem
