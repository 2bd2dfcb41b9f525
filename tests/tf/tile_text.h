// A tile program for people, in tests.
#pragma once

#include <string>
#include <variant>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/cpu/tile_program.h"

namespace tfmem::tile_text {

using Code = TileInstruction::Kind;

inline std::string Location(bool scalar, int number) {
  return absl::StrCat(scalar ? "row " : "wide ", number);
}

inline std::string Arguments(const TileInstruction& instruction) {
  const bool other_shape = instruction.kind == Code::kBroadcast ||
                           instruction.kind == Code::kReduce ||
                           instruction.kind == Code::kGatherRows;
  std::string text;
  for (int argument : instruction.arguments) {
    if (argument < 0) continue;
    absl::StrAppend(&text, text.empty() ? "" : ", ",
                    Location(instruction.type.scalar != other_shape, argument));
  }
  return text;
}

inline std::string Text(const TileInstruction& instruction) {
  const std::string target = Location(instruction.type.scalar, instruction.target);
  const std::string arguments = Arguments(instruction);
  const char* dtype = NameOf(instruction.type.dtype);
  const int index = instruction.index;
  switch (instruction.kind) {
    case Code::kLoad:
      return absl::StrCat(target, " <- ", dtype, " port ", index,
                          instruction.same_rows ? ", the same in all rows" : "");
    case Code::kLoadView:
      return absl::StrCat(target, " <- view of port ", index);
    case Code::kLoadKept:
      return absl::StrCat(target, " <- kept value ", index);
    case Code::kLoadReduced:
      return absl::StrCat(target, " <- reduction ", index);
    case Code::kBroadcast:
      return absl::StrCat(target, " <- broadcast(", arguments, ")");
    case Code::kCompute:
      return absl::StrCat(target, " <- ", dtype, " ", InfoOf(instruction.op).name, "(", arguments,
                          ")");
    case Code::kCast:
      return absl::StrCat(target, " <- cast to ", dtype, "(", arguments, ")");
    case Code::kReduce:
      return absl::StrCat(target, " <- ", NameOf(instruction.reduction), "(", arguments, ")");
    case Code::kGather:
    case Code::kGatherRows:
      return absl::StrCat(target, " <- ", dtype, " port ", index, " at (", arguments, ")");
    case Code::kStore:
      return absl::StrCat("port ", index, " <- ", arguments);
    case Code::kKeep:
      return absl::StrCat("kept value ", index, " <- ", arguments);
    case Code::kPart:
      return absl::StrCat("reduction ", index, " <- part(", arguments, ")");
    case Code::kCheck:
      return absl::StrCat("check ", index, " of ", arguments);
  }
  return "";
}

}  // namespace tfmem::tile_text

namespace tfmem {

// An instruction a line.
inline std::string ToText(const TileProgram& program) {
  std::string text;
  for (const TileConstant& constant : program.constants) {
    absl::StrAppend(&text, tile_text::Location(constant.type.scalar, constant.location), " = ",
                    NameOf(constant.type.dtype), " ",
                    std::visit([](auto value) { return absl::StrCat(value); }, constant.value),
                    "\n");
  }
  for (const TileStage& stage : program.stages) {
    absl::StrAppend(&text, "stage over domain ", stage.domain, "\n");
    for (const TileInstruction& instruction : stage.code) {
      absl::StrAppend(&text, "  ", tile_text::Text(instruction), "\n");
    }
  }
  return text;
}

}  // namespace tfmem
