// A tile program: straight-line code over tiles, which an interpreter runs tile by tile over a
// domain of rows and columns. Knows no device, no sizes and no TensorFlow.
//
// sum over columns of (a + b[row]), of tiles of 2 rows and 3 columns:
//
//   load    wide 0 <- port 0      a's tile            [2, 3]
//   load    row 0  <- port 1      b's part            [2]
//   broadcast wide 1 <- row 0     in each column      [2, 3]
//   compute wide 0 <- add(wide 0, wide 1)             a location is used again once its value died
//   reduce  row 0  <- sum(wide 0)                     [2]
//   store   port 0 <- row 0
//
// What a port is, is the environment's matter (tile_interpreter.h): a tensor, a state, a product.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "custom_ops/ops/elementwise.h"

namespace tfmem {

// X(enumerator, name)
#define TFMEM_TILE_DTYPES(X) \
  X(kFloat32, "float32")     \
  X(kFloat64, "float64")     \
  X(kFloat16, "float16")     \
  X(kBfloat16, "bfloat16")   \
  X(kInt32, "int32")         \
  X(kInt64, "int64")         \
  X(kBool, "bool")

enum class DType : int {
#define TFMEM_ENUMERATE(name, text) name,
  TFMEM_TILE_DTYPES(TFMEM_ENUMERATE)
#undef TFMEM_ENUMERATE
};

// X(enumerator, name)
#define TFMEM_REDUCTIONS(X) \
  X(kSum, "sum")            \
  X(kMean, "mean")          \
  X(kMax, "max")            \
  X(kMin, "min")            \
  X(kProduct, "product")    \
  X(kAny, "any")            \
  X(kAll, "all")

enum class Reduction : int {
#define TFMEM_ENUMERATE(name, text) name,
  TFMEM_REDUCTIONS(TFMEM_ENUMERATE)
#undef TFMEM_ENUMERATE
};

inline constexpr int kMostTileLocations = 1 << 14;

// A value of a tile, [rows, columns], or one number for each row, [rows].
struct TileType {
  DType dtype = DType::kFloat32;
  bool scalar = false;  // one number a row

  friend bool operator==(const TileType& a, const TileType& b) {
    return a.dtype == b.dtype && a.scalar == b.scalar;
  }
};

// One instruction. Wide values and scalar ones have separate locations.
struct TileInstruction {
  enum class Kind : int {
    kLoad,         // target <- port `index` of what is read
    kLoadView,     // the same, where it lies: the location owns no memory
    kLoadKept,     // target <- value `index`, kept by an earlier stage
    kLoadReduced,  // target <- reduction `index` of what all tiles of an earlier stage gave it
    kBroadcast,    // target <- the scalar in arguments[0], in each column
    kCompute,      // target <- op(arguments)
    kCast,         // target <- arguments[0], of dtype `from`
    kReduce,       // target <- for each row the reduction of arguments[0] over the columns
    kGather,       // target <- port `index` of what is read, at offsets arguments[0]
    kGatherRows,   // the same with one offset a row
    kStore,        // port `index` of what is written <- arguments[0]
    kKeep,         // kept value `index` <- arguments[0]
    kPart,         // this tile's part of reduction `index` <- arguments[0]
    kCheck,        // ends the run unless all of arguments[0] are within bounds `index`
  };

  Kind kind = Kind::kCompute;
  TileType type;                 // of the target; of what is stored where there is none
  DType from = DType::kFloat32;  // of a cast's argument and a comparison's
  int index = 0;
  // A load whose rows are all the same: the location is its own in the stage, so that it need not
  // be loaded for each tile.
  bool same_rows = false;
  Elementwise op = Elementwise::kAdd;
  Reduction reduction = Reduction::kSum;
  int target = -1;
  int arguments[3] = {-1, -1, -1};
};

// Stages run one after the other, each over all tiles of a domain. Domain 0 has one row: it is that
// of values that no row varies. The environment knows how many rows each other domain has; all have
// the same columns.
struct TileStage {
  int domain = 0;
  std::vector<TileInstruction> code;
};

// The value of a constant: an integer or a truth value, which is exact, or a real number.
using ConstantValue = std::variant<double, int64_t>;

// A constant has a separate location, filled before the first tile.
struct TileConstant {
  ConstantValue value;
  TileType type;
  int location = 0;
};

// A reduction of the parts that tiles give.
struct TileReduction {
  Reduction reduction = Reduction::kSum;
  TileType type;      // of what is reduced
  bool rows = false;  // over which axes
  bool columns = false;
  int domain = 0;  // the stage's that gives the parts
};

// A value that passes from one stage to later ones.
struct TileKept {
  TileType type;
  int domain = 0;  // the stage's that keeps it
};

struct TileProgram {
  int domains = 1;
  int checks = 0;  // bounds that indices are checked against
  std::vector<TileStage> stages;
  std::vector<TileConstant> constants;
  std::vector<TileType> loads;  // of the ports
  std::vector<TileType> stores;
  std::vector<TileKept> kept;
  std::vector<TileReduction> reductions;
  int wide_locations = 0;  // constants come first, then tiles
  int views = 0;           // wide locations after these, without memory
  int scalar_locations = 0;
};

bool Takes(const ElementwiseInfo& info, DType dtype);
bool Takes(Reduction reduction, DType dtype);

const char* NameOf(DType dtype);
const char* NameOf(Reduction reduction);

constexpr bool IsHalf(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBfloat16; }
// What a tile holds: for the half types float32 numbers that have been rounded.
constexpr DType StorageOf(DType dtype) { return IsHalf(dtype) ? DType::kFloat32 : dtype; }
// Bytes of a number in a tile, and in a tensor.
constexpr int TileBytes(DType dtype) {
  if (dtype == DType::kBool) return 1;
  return dtype == DType::kFloat64 || dtype == DType::kInt64 ? 8 : 4;
}
constexpr int TensorBytes(DType dtype) { return IsHalf(dtype) ? 2 : TileBytes(dtype); }

}  // namespace tfmem
