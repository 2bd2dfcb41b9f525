#include "custom_ops/ops/cpu/tile_program.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

constexpr absl::string_view kFormat = "tile 1";
constexpr int kMostWords = 1 << 22;  // of a program that is read

template <typename... Parts>
absl::Status Wrong(Parts... parts) {
  return absl::InvalidArgumentError(absl::StrCat("tile program: ", parts...));
}

class Writer {
 public:
  void Word(int value) {
    const uint32_t bits = value;
    for (int shift = 0; shift < 32; shift += 8) bytes_.push_back(static_cast<char>(bits >> shift));
  }
  void Type(TileType type) {
    Word(static_cast<int>(type.dtype));
    Word(type.scalar);
  }
  void Number(double value) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    Word(static_cast<uint32_t>(bits));
    Word(static_cast<uint32_t>(bits >> 32));
  }
  template <typename List, typename Write>
  void All(const List& list, Write write) {
    Word(list.size());
    for (const auto& element : list) write(element);
  }
  // Its number among the names that were used so far.
  int Name(absl::string_view name) {
    const auto found = std::find(names_.begin(), names_.end(), name);
    if (found != names_.end()) return found - names_.begin();
    names_.emplace_back(name);
    return names_.size() - 1;
  }
  std::string Bytes() const {
    return absl::StrCat(kFormat, "\n", absl::StrJoin(names_, " "), "\n", bytes_);
  }

 private:
  std::vector<std::string> names_;
  std::string bytes_;
};

// After the first thing that is wrong all that is read is zero.
class Reader {
 public:
  explicit Reader(absl::string_view bytes) : rest_(bytes) {}

  absl::Status status;

  absl::string_view Line() {
    const size_t end = rest_.find('\n');
    if (end == absl::string_view::npos) {
      Fail("ends within its first lines");
      return "";
    }
    const absl::string_view line = rest_.substr(0, end);
    rest_.remove_prefix(end + 1);
    return line;
  }

  int Word() {
    if (rest_.size() < 4) {
      Fail("ends before all that it announces");
      return 0;
    }
    uint32_t bits = 0;
    for (int i = 3; i >= 0; --i) bits = bits << 8 | static_cast<uint8_t>(rest_[i]);
    rest_.remove_prefix(4);
    return static_cast<int>(bits);
  }

  // At least `least` and less than `end`.
  int Within(const char* what, int least, int end) {
    const int value = Word();
    if (value >= least && value < end) return value;
    Fail(absl::StrCat(what, " is ", value, "; expected ", least, " to ", end - 1));
    return least;
  }

  bool Flag() { return Within("a flag", 0, 2) != 0; }

  double Number() {
    const uint64_t low = static_cast<uint32_t>(Word());
    const uint64_t bits = low | static_cast<uint64_t>(static_cast<uint32_t>(Word())) << 32;
    double value = 0;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }

  TileType Type() {
    const DType dtype = Dtype();
    return {dtype, Flag()};
  }

  DType Dtype() {
    return static_cast<DType>(Within("a dtype", 0, static_cast<int>(DType::kBool) + 1));
  }

  Reduction Kind() {
    return static_cast<Reduction>(Within("a reduction", 0, static_cast<int>(Reduction::kAll) + 1));
  }

  // A count of things of at least one word each, so that it is no larger than what follows.
  template <typename Element, typename Read>
  void All(std::vector<Element>* list, Read read) {
    const int count = Within("a count", 0, kMostWords);
    if (static_cast<size_t>(count) > rest_.size() / 4) Fail("announces more than there is");
    for (int i = 0; i < count && status.ok(); ++i) list->push_back(read());
  }

  bool done() const { return rest_.empty(); }

 private:
  void Fail(absl::string_view what) {
    if (status.ok()) status = Wrong(what);
    rest_ = "";
  }

  absl::string_view rest_;
};

}  // namespace

std::string SerializeTileProgram(const TileProgram& program) {
  Writer out;
  out.Word(program.domains);
  out.All(program.loads, [&](TileType type) { out.Type(type); });
  out.All(program.stores, [&](TileType type) { out.Type(type); });
  out.All(program.constants, [&](const TileConstant& constant) {
    out.Number(constant.value);
    out.Type(constant.type);
    out.Word(constant.location);
  });
  out.All(program.kept, [&](const TileKept& kept) {
    out.Type(kept.type);
    out.Word(kept.domain);
  });
  out.All(program.reductions, [&](const TileReduction& reduction) {
    out.Word(static_cast<int>(reduction.reduction));
    out.Type(reduction.type);
    for (int word : {+reduction.rows, +reduction.columns, reduction.domain}) out.Word(word);
  });
  out.Word(program.wide_locations);
  out.Word(program.views);
  out.Word(program.scalar_locations);
  out.All(program.stages, [&](const TileStage& stage) {
    out.Word(stage.domain);
    out.All(stage.code, [&](const TileInstruction& instruction) {
      out.Word(static_cast<int>(instruction.kind));
      out.Type(instruction.type);
      out.Word(static_cast<int>(instruction.from));
      out.Word(instruction.index);
      out.Word(out.Name(InfoOf(instruction.op).name));
      out.Word(static_cast<int>(instruction.reduction));
      out.Word(instruction.target);
      for (int argument : instruction.arguments) out.Word(argument);
    });
  });
  return out.Bytes();
}

absl::StatusOr<TileProgram> ParseTileProgram(absl::string_view bytes) {
  if (bytes.size() > kMostWords * size_t{4}) return Wrong("has ", bytes.size(), " bytes");
  Reader in(bytes);
  if (const absl::string_view format = in.Line(); format != kFormat) {
    return Wrong("expected '", kFormat, "' on the first line, found '", format.substr(0, 40),
                 "'; this op library and the program's writer differ in version");
  }
  std::vector<Elementwise> ops;
  for (absl::string_view name : absl::StrSplit(in.Line(), ' ', absl::SkipEmpty())) {
    const std::optional<Elementwise> op = ElementwiseNamed(name);
    if (!op) return Wrong("there is no op '", name.substr(0, 40), "' in this op library");
    ops.push_back(*op);
  }
  TileProgram program;
  const int most = kMostWords;
  program.domains = in.Within("the number of domains", 1, most);
  in.All(&program.loads, [&] { return in.Type(); });
  in.All(&program.stores, [&] { return in.Type(); });
  in.All(&program.constants, [&] {
    TileConstant constant;
    constant.value = in.Number();
    constant.type = in.Type();
    constant.location = in.Within("a constant's location", 0, most);
    return constant;
  });
  in.All(&program.kept, [&] {
    TileKept kept;
    kept.type = in.Type();
    kept.domain = in.Within("a domain", 0, program.domains);
    return kept;
  });
  in.All(&program.reductions, [&] {
    TileReduction reduction;
    reduction.reduction = in.Kind();
    reduction.type = in.Type();
    reduction.rows = in.Flag();
    reduction.columns = in.Flag();
    reduction.domain = in.Within("a domain", 0, program.domains);
    return reduction;
  });
  program.wide_locations = in.Within("wide locations", 0, kMostTileLocations + 1);
  program.views = in.Within("views", 0, kMostTileLocations + 1);
  program.scalar_locations = in.Within("scalar locations", 0, kMostTileLocations + 1);
  in.All(&program.stages, [&] {
    TileStage stage;
    stage.domain = in.Within("a domain", 0, program.domains);
    in.All(&stage.code, [&] {
      TileInstruction instruction;
      const int kinds = static_cast<int>(TileInstruction::Kind::kPart) + 1;
      instruction.kind = static_cast<TileInstruction::Kind>(in.Within("an instruction", 0, kinds));
      instruction.type = in.Type();
      instruction.from = in.Dtype();
      instruction.index = in.Within("an index", 0, most);
      const int op = in.Within("an op", 0, std::max<int>(ops.size(), 1));
      if (!ops.empty()) instruction.op = ops[op];
      instruction.reduction = in.Kind();
      instruction.target = in.Within("a target", -1, most);
      for (int& argument : instruction.arguments) argument = in.Within("an argument", -1, most);
      return instruction;
    });
    return stage;
  });
  if (!in.status.ok()) return in.status;
  if (!in.done()) return Wrong("is followed by something else");
  TFMEM_RETURN_IF_ERROR(CheckTileProgram(program));
  return program;
}

bool Takes(const ElementwiseInfo& info, DType dtype) {
  const int kind = dtype == DType::kBool                              ? kBools
                   : dtype == DType::kInt32 || dtype == DType::kInt64 ? kIntegers
                                                                      : kFloats;
  return (info.kinds & kind) != 0;
}

bool Takes(Reduction reduction, DType dtype) {
  const bool logical = reduction == Reduction::kAny || reduction == Reduction::kAll;
  const bool integer = dtype == DType::kInt32 || dtype == DType::kInt64;
  if (reduction == Reduction::kMean && integer) return false;
  return logical == (dtype == DType::kBool);
}

const char* NameOf(DType dtype) {
  static constexpr const char* names[] = {
#define TFMEM_NAME(name, text) text,
      TFMEM_TILE_DTYPES(TFMEM_NAME)
#undef TFMEM_NAME
  };
  return names[static_cast<int>(dtype)];
}

const char* NameOf(Reduction reduction) {
  static constexpr const char* names[] = {
#define TFMEM_NAME(name, text) text,
      TFMEM_REDUCTIONS(TFMEM_NAME)
#undef TFMEM_NAME
  };
  return names[static_cast<int>(reduction)];
}

}  // namespace tfmem
