#include "custom_ops/ops/cpu/tile_run.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "custom_ops/ops/cpu/tensor_port.h"
#include "custom_ops/ops/cpu/tile_interpreter.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

using Code = TileInstruction::Kind;

constexpr int64_t kTileNumbers = 1024;                // of a value: some tiles fill half an L1
constexpr int64_t kMostGroups = 64;                   // of rows, that are reduced on their own
constexpr int64_t kMostNumbers = int64_t{1} << 40;    // of a domain or a tensor
constexpr int64_t kMostWorkspace = int64_t{1} << 42;  // bytes

int64_t WholeVectors(int64_t numbers) { return (numbers + 63) / 64 * 64; }

// Arrays in one block of memory, each of whole cache lines.
class Arena {
 public:
  // Where an array begins.
  int64_t Reserve(int64_t numbers, DType dtype) {
    const int64_t place = size_;
    size_ = std::min(size_ + WholeVectors(numbers) * TileBytes(dtype), kMostWorkspace);
    return place;
  }
  absl::Status Allocate() {
    memory_.reset(size_ < kMostWorkspace ? std::aligned_alloc(64, size_ + 64) : nullptr);
    if (memory_ != nullptr) return absl::OkStatus();
    return absl::ResourceExhaustedError(absl::StrCat("program: no memory for ", size_, " bytes"));
  }
  char* At(int64_t place) const { return static_cast<char*>(memory_.get()) + place; }

 private:
  int64_t size_ = 0;
  std::unique_ptr<void, decltype(&std::free)> memory_{nullptr, std::free};
};

// A tile program's environment: the tile that is worked on, of tensors in memory.
class TensorTiles {
 public:
  // `rows` are those of each domain.
  TensorTiles(const TileProgram& program, std::vector<int64_t> rows, int64_t columns,
              const InstructionSet& kernels)
      : program_(program), kernels_(kernels), all_rows_(std::move(rows)), all_columns_(columns) {
    bool whole_rows = false;
    for (const TileStage& stage : program.stages) {
      for (const TileInstruction& instruction : stage.code) {
        whole_rows |= instruction.kind == Code::kReduce;
      }
    }
    tile_columns_ = whole_rows ? columns : std::min(columns, kTileNumbers);
    const int64_t most = *std::max_element(all_rows_.begin(), all_rows_.end());
    tile_rows_ = std::clamp<int64_t>(kTileNumbers / std::max<int64_t>(tile_columns_, 1), 1, most);
  }

  std::vector<TensorPort> loads;
  std::vector<TensorPort> stores;

  absl::Status Allocate() {
    wide_bytes_ = WholeVectors(tile_rows_ * tile_columns_) * 8;
    scalar_bytes_ = WholeVectors(tile_rows_) * 8;
    wide_ = arena_.Reserve(program_.wide_locations * (wide_bytes_ / 8), DType::kFloat64);
    scalar_ = arena_.Reserve(program_.scalar_locations * (scalar_bytes_ / 8), DType::kFloat64);
    sums_ = arena_.Reserve(tile_rows_, DType::kFloat64);
    for (const TileKept& kept : program_.kept) {
      const int64_t columns = kept.type.scalar ? 1 : all_columns_;
      kept_.push_back(arena_.Reserve(all_rows_[kept.domain] * columns, kept.type.dtype));
    }
    for (const TileReduction& reduction : program_.reductions) {
      const int64_t groups = std::max<int64_t>(Groups(reduction.domain), 1);
      parts_.push_back(arena_.Reserve(groups * Totals(reduction), reduction.type.dtype));
    }
    TFMEM_RETURN_IF_ERROR(arena_.Allocate());
    for (const TileConstant& constant : program_.constants) FillConstant(constant);
    return absl::OkStatus();
  }

  void Run(const TileStage& stage) {
    const int64_t all = all_rows_[stage.domain];
    const int64_t tiles = Tiles(stage.domain), groups = Groups(stage.domain);
    for (group_ = 0; group_ < groups; ++group_) {
      const int64_t first = tiles * group_ / groups, end = tiles * (group_ + 1) / groups;
      for (int64_t tile = first; tile < end; ++tile) {
        const int64_t row = tile * tile_rows_;
        RunRows(stage, row, std::min(tile_rows_, all - row), tile == first);
      }
    }
    for (const TileInstruction& instruction : stage.code) {
      if (instruction.kind == Code::kPart) Finish(instruction.index);
    }
  }

  // ---- what the interpreter asks for ----

  int64_t rows() const { return range_.rows; }
  int64_t columns() const { return range_.columns; }
  int64_t Numbers(bool scalar) const {
    return WholeVectors(scalar ? range_.rows : range_.rows * range_.columns);
  }
  void* Tile(TileType type, int location) const {
    return type.scalar ? arena_.At(scalar_ + location * scalar_bytes_)
                       : arena_.At(wide_ + location * wide_bytes_);
  }

  const void* Load(const TileInstruction& instruction, void* tile) const {
    const TileType type = instruction.type;
    if (instruction.kind == Code::kLoad) {
      return loads[instruction.index].Load(RangeOf(type), tile, kernels_);
    }
    const bool reduced = instruction.kind == Code::kLoadReduced;
    const bool one_row = reduced || program_.kept[instruction.index].domain == 0;
    Copy(type, arena_.At(reduced ? parts_[instruction.index] : kept_[instruction.index]), one_row,
         static_cast<char*>(tile), false);
    return tile;
  }

  void Store(const TileInstruction& instruction, const void* value) {
    const int index = instruction.index;
    if (instruction.kind == Code::kStore) {
      stores[index].Store(RangeOf(instruction.type), value, kernels_);
    } else if (instruction.kind == Code::kKeep) {
      char* tile = const_cast<char*>(static_cast<const char*>(value));
      Copy(instruction.type, arena_.At(kept_[index]), program_.kept[index].domain == 0, tile, true);
    } else {
      AddPart(index, value);
    }
  }

 private:
  int64_t Tiles(int domain) const { return (all_rows_[domain] + tile_rows_ - 1) / tile_rows_; }
  int64_t Groups(int domain) const { return std::min(Tiles(domain), kMostGroups); }

  // All columns of some rows. `begin`: the first ones of their group.
  void RunRows(const TileStage& stage, int64_t row, int64_t rows, bool begin) {
    int64_t column = 0;
    do {
      range_ = {row, rows, column, std::min(tile_columns_, all_columns_ - column)};
      begin_rows_ = begin;
      begin_group_ = begin && column == 0;
      TileInterpreter(program_, kernels_, *this).Run(stage);
      column += tile_columns_;
    } while (column < all_columns_);
  }

  TileRange RangeOf(TileType type) const {
    return type.scalar ? TileRange{range_.first_row, range_.rows, 0, 1} : range_;
  }

  // Between a tile and a buffer of all rows, or of one that is every row's.
  void Copy(TileType type, char* buffer, bool one_row, char* tile, bool to_buffer) const {
    const TileRange range = RangeOf(type);
    const int64_t bytes = TileBytes(type.dtype), line = range.columns * bytes;
    const int64_t stride = one_row ? 0 : (type.scalar ? 1 : all_columns_) * bytes;
    buffer += range.first_row * stride + range.first_column * bytes;
    for (int64_t row = 0; row < range.rows; ++row) {
      char* from = buffer + row * stride;
      char* to = tile + row * line;
      if (to_buffer) std::swap(from, to);
      std::memcpy(to, from, line);
    }
  }

  // The numbers that one group's part of a reduction has.
  int64_t Totals(const TileReduction& reduction) const {
    return reduction.columns || reduction.type.scalar ? 1 : all_columns_;
  }

  void AddPart(int index, const void* value) {
    const TileReduction& reduction = program_.reductions[index];
    const TileType type = reduction.type;
    if (type.scalar && range_.first_column > 0) return;  // seen with the first columns
    char* totals = arena_.At(parts_[index]);
    totals += group_ * Totals(reduction) * TileBytes(type.dtype);
    if (reduction.columns) {
      void* sums = arena_.At(sums_);
      kernels_.tile.reduce_columns(reduction.reduction, type.dtype, value, range_.rows,
                                   range_.columns, sums);
      kernels_.tile.reduce_rows(reduction.reduction, type.dtype, sums, range_.rows, 1, totals,
                                begin_group_);
    } else {
      const TileRange range = RangeOf(type);
      totals += range.first_column * TileBytes(type.dtype);
      kernels_.tile.reduce_rows(reduction.reduction, type.dtype, value, range.rows, range.columns,
                                totals, begin_rows_);
    }
  }

  // The groups' parts to the whole, which is where the first was.
  void Finish(int index) {
    const TileReduction& reduction = program_.reductions[index];
    const DType dtype = reduction.type.dtype;
    const int64_t totals = Totals(reduction), bytes = TileBytes(dtype);
    const int64_t groups = Groups(reduction.domain);
    char* whole = arena_.At(parts_[index]);
    if (groups == 0) {
      kernels_.tile.reduce_columns(reduction.reduction, dtype, whole, totals, 0, whole);
    } else {
      kernels_.tile.reduce_rows(reduction.reduction, dtype, whole + totals * bytes, groups - 1,
                                totals, whole, false);
    }
    if (reduction.reduction == Reduction::kMean) {
      const int64_t rows = reduction.rows ? all_rows_[reduction.domain] : 1;
      kernels_.tile.divide(dtype, whole, rows * (reduction.columns ? all_columns_ : 1), totals);
    }
    if (IsHalf(dtype)) {
      kernels_.tile.cast(DType::kFloat32, dtype, whole, whole, WholeVectors(totals));
    }
  }

  void FillConstant(const TileConstant& constant) const {
    double values[64];
    std::fill_n(values, 64, constant.value);
    const TileType type = constant.type;
    char* tile = static_cast<char*>(Tile(type, constant.location));
    const int64_t block = 64 * TileBytes(type.dtype);
    const int64_t bytes = (type.scalar ? scalar_bytes_ : wide_bytes_) / 8 * TileBytes(type.dtype);
    if (bytes > 0) kernels_.tile.cast(DType::kFloat64, type.dtype, values, tile, 64);
    for (int64_t at = block; at < bytes; at += block) std::memcpy(tile + at, tile, block);
  }

  const TileProgram& program_;
  const InstructionSet& kernels_;
  const std::vector<int64_t> all_rows_;
  const int64_t all_columns_;
  int64_t tile_rows_ = 0;
  int64_t tile_columns_ = 0;

  Arena arena_;
  int64_t wide_bytes_ = 0;
  int64_t scalar_bytes_ = 0;
  int64_t wide_ = 0;
  int64_t scalar_ = 0;
  int64_t sums_ = 0;  // of a tile's rows
  std::vector<int64_t> kept_;
  std::vector<int64_t> parts_;

  int64_t group_ = 0;
  bool begin_rows_ = false;
  bool begin_group_ = false;
  TileRange range_;
};

// The product; -1 if there are too many.
int64_t Numbers(const std::vector<int64_t>& sizes) {
  __int128 numbers = 1;
  bool none = false;
  for (int64_t size : sizes) {
    if (size < 0) return -1;
    none |= size == 0;
    numbers = std::min<__int128>(numbers * std::max<int64_t>(size, 1), kMostNumbers + 1);
  }
  if (numbers > kMostNumbers) return -1;
  return none ? 0 : static_cast<int64_t>(numbers);
}

template <typename... Parts>
absl::Status Wrong(Parts... parts) {
  return absl::InvalidArgumentError(absl::StrCat("program: ", parts...));
}

absl::Status CheckSizes(const Expression& expression, const std::vector<int64_t>& axes,
                        const std::vector<TensorView>& inputs,
                        const std::vector<MutableTensorView>& outputs) {
  if (axes.size() != expression.axes.size() || inputs.size() != expression.tensors.size() ||
      outputs.size() != expression.outputs.size()) {
    return Wrong("has ", expression.axes.size(), " axes, ", expression.tensors.size(),
                 " inputs and ", expression.outputs.size(), " outputs; found ", axes.size(), ", ",
                 inputs.size(), " and ", outputs.size());
  }
  for (size_t i = 0; i < axes.size(); ++i) {
    const int64_t size = expression.axes[i];
    if (size != 0 && size != axes[i]) {
      return Wrong("axis ", i, " has ", size, " positions; found ", axes[i]);
    }
  }
  if (Numbers(axes) < 0) return Wrong("the axes have a negative size, or too many positions");
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (static_cast<int>(inputs[i].shape.size()) != expression.tensors[i].rank) {
      return Wrong("tensor ", i, " has ", expression.tensors[i].rank, " dimensions; found ",
                   inputs[i].shape.size());
    }
    if (Numbers(inputs[i].shape) < 0) return Wrong("tensor ", i, " has too many numbers");
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    std::vector<int64_t> shape;
    for (int axis : expression.outputs[i].axes) shape.push_back(axes[axis]);
    const DType dtype = expression.nodes[expression.outputs[i].node].dtype;
    const int64_t bytes = Numbers(shape) * TensorBytes(dtype);
    if (outputs[i].bytes != bytes) {
      return Wrong("output ", i, " has ", bytes, " bytes; found ", outputs[i].bytes);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RunExpression(const Expression& expression, const ExpressionTiles& tiles,
                           const std::vector<int64_t>& axes, const std::vector<TensorView>& inputs,
                           const std::vector<MutableTensorView>& outputs,
                           const InstructionSet& kernels) {
  TFMEM_RETURN_IF_ERROR(CheckSizes(expression, axes, inputs, outputs));
  std::vector<int64_t> rows;
  for (const std::vector<int>& domain : tiles.rows) {
    rows.push_back(1);
    for (int axis : domain) rows.back() *= axes[axis];
  }
  const int64_t columns = tiles.column < 0 ? 1 : axes[tiles.column];
  TensorTiles run(tiles.program, std::move(rows), columns, kernels);
  for (int place : tiles.loads) {
    const ExpressionNode& node = expression.nodes[place];
    const TileAxes at = tiles.AxesOf(node.varies, axes);
    if (node.kind == ExpressionNode::Kind::kPosition) {
      run.loads.push_back(TensorPort::Position(node, at));
      continue;
    }
    const TensorView& input = inputs[node.tensor];
    TFMEM_ASSIGN_OR_RETURN(TensorPort port, TensorPort::Input(node, input.data, input.shape, at));
    run.loads.push_back(std::move(port));
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    const ExpressionOutput& output = expression.outputs[i];
    run.stores.push_back(TensorPort::Output(expression.nodes[output.node].dtype, output.axes,
                                            outputs[i].data, tiles.AxesOf(output.varies(), axes)));
  }
  TFMEM_RETURN_IF_ERROR(run.Allocate());
  for (const TileStage& stage : tiles.program.stages) {
    if (!stage.code.empty()) run.Run(stage);
  }
  return absl::OkStatus();
}

}  // namespace tfmem
