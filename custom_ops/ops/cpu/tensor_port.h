// How tiles are read from tensors and written to them: where each position of a domain lies.
#pragma once

#include <cstdint>
#include <vector>

#include "custom_ops/ops/cpu/cpu_kernels.h"
#include "custom_ops/ops/cpu/expression_tiles.h"

namespace tfmem {

// A part of a domain.
struct TileRange {
  int64_t first_row = 0;
  int64_t rows = 0;
  int64_t first_column = 0;
  int64_t columns = 0;

  // What a value that has one number a row has of it.
  TileRange scalars() const { return {first_row, rows, 0, 1}; }
};

class TensorPort {
 public:
  TensorPort(const TilePort& port, const ExpressionTiles& tiles);

  // Where the range's numbers lie in the tensor, if they lie as a tile's would and need no
  // conversion; else null.
  void* Direct(const TileRange& range, const void* tensor) const;

  // Fills `tile`, or says where the numbers lie. `scratch` has room for 8 bytes a number.
  const void* Load(const TileRange& range, const void* tensor, void* tile, void* scratch,
                   const InstructionSet& kernels) const;
  void Store(const TileRange& range, const void* tile, void* tensor, void* scratch,
             const InstructionSet& kernels) const;

  // Fills `tile` with random numbers of a generator, which the access numbers.
  void Draw(const TileRange& range, const uint64_t* key, const uint64_t* counter, void* tile,
            const InstructionSet& kernels) const;
  bool random() const { return random_; }

  // Loads from `offsets` further on, one for each number, or for each row.
  const void* Gather(const TileRange& range, const void* tensor, const int64_t* offsets,
                     bool for_rows, void* tile, void* scratch, const InstructionSet& kernels) const;

  // Whether numbers lie closer together along rows than along columns.
  bool transposed() const;
  // Whether both find each position at the same place.
  bool SameAs(const TensorPort& other) const;

 private:
  struct Dimension {
    int64_t size = 0;
    int64_t stride = 0;
  };
  // A term of an axis that is reached every `step` positions of the rows or columns.
  struct UnevenTerm {
    IndexTerm term;
    int64_t step = 1;
    int64_t size = 1;

    int64_t At(int64_t position) const { return term.At(position / step % size); }
  };
  // The rows or the columns: the last dimension is the fastest, and those that can be one are one.
  struct Line {
    std::vector<Dimension> dimensions;
    std::vector<UnevenTerm> uneven;

    int64_t At(int64_t position) const;
    bool even() const { return dimensions.size() <= 1 && uneven.empty(); }
    int64_t stride() const { return dimensions.empty() ? 0 : dimensions[0].stride; }
  };

  static Line LineOf(const std::vector<int>& along, const Access& access,
                     const std::vector<int64_t>& sizes);
  template <typename Run>
  static void ForRuns(const Line& line, int64_t first, int64_t count, int64_t base, Run run);
  template <typename Run>
  void ForRuns(const TileRange& range, Run run) const;
  template <typename Number>
  void Read(const TileRange& range, const Number* tensor, Number* tile,
            const InstructionSet& kernels) const;
  template <typename Number>
  void ReadAt(const TileRange& range, const Number* tensor, const int64_t* offsets, bool for_rows,
              Number* tile) const;
  template <typename Number>
  void Write(const TileRange& range, const Number* tile, Number* tensor,
             const InstructionSet& kernels) const;
  const void* Widen(const void* halves, int64_t count, void* tile,
                    const InstructionSet& kernels) const;

  bool positions_;
  bool random_;
  DType dtype_;
  int64_t base_;
  Line rows_;
  Line columns_;
};

}  // namespace tfmem
