// Products of matrices, included by cpu_kernels_body.h, under the same pragmas and rules.

constexpr int64_t kDepth = 256;  // longer sums are sums of sums, which lose fewer digits

template <typename Real, int rows>
void MultiplyRows(const Real* operand, int64_t operand_stride, const Real* weights,
                  int64_t weights_stride, int64_t depth, Real* target, int64_t target_stride,
                  bool accumulate) {
  constexpr int lanes = kLanes<Real>;
  Vector<Real> sums[rows][kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) sums[row][i] = Vector<Real>{};
  }
  for (int64_t k = 0; k < depth; ++k, weights += weights_stride) {
    Vector<Real> loaded[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) loaded[i] = Load(weights + i * lanes);
#pragma GCC unroll 8
    for (int row = 0; row < rows; ++row) {
      const Real factor = operand[row * operand_stride + k];
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) sums[row][i] += loaded[i] * factor;
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      Real* place = target + row * target_stride + i * lanes;
      Store(accumulate ? Load(place) + sums[row][i] : sums[row][i], place);
    }
  }
}

template <typename Real, int most>
TFMEM_INLINE void MultiplyBlock(int64_t rows, const Real* operand, int64_t operand_stride,
                                const Real* weights, int64_t weights_stride, int64_t depth,
                                Real* target, int64_t target_stride, bool accumulate) {
  if (rows == most) {
    MultiplyRows<Real, most>(operand, operand_stride, weights, weights_stride, depth, target,
                             target_stride, accumulate);
  } else if constexpr (most > 1) {
    MultiplyBlock<Real, most - 1>(rows, operand, operand_stride, weights, weights_stride, depth,
                                  target, target_stride, accumulate);
  }
}

template <typename Real>
void Multiply(const Real* operand, int64_t operand_stride, int64_t rows, const Real* weights,
              int64_t weights_stride, int64_t depth, Real* target, int64_t target_stride,
              bool accumulate) {
  for (int64_t blocks = (rows + TFMEM_ROWS - 1) / TFMEM_ROWS; blocks > 0; --blocks) {
    const int64_t block = (rows + blocks - 1) / blocks;  // of equal height: 20 = 5 + 5 + 5 + 5
    for (int64_t k = 0; k < depth; k += kDepth) {
      MultiplyBlock<Real, TFMEM_ROWS>(
          block, operand + k, operand_stride, weights + k * weights_stride, weights_stride,
          depth - k < kDepth ? depth - k : kDepth, target, target_stride, accumulate || k > 0);
    }
    rows -= block;
    operand += block * operand_stride;
    target += block * target_stride;
  }
}

template <typename Real, int lanes>
TFMEM_INLINE Real SumOfLanes(Lanes<Real, lanes> vector) {
  if constexpr (lanes == 1) {
    return vector[0];
  } else {
    Lanes<Real, lanes / 2> halves[2];
    std::memcpy(halves, &vector, sizeof(halves));
    return SumOfLanes<Real, lanes / 2>(halves[0] + halves[1]);
  }
}

// The sums of the lanes of each of four vectors, added in the same order.
template <typename Real, int lanes>
TFMEM_INLINE void SumsOfLanes(const Lanes<Real, lanes>* vectors, Real* sums) {
  if constexpr (lanes > 4) {
    Lanes<Real, lanes / 2> folded[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      Lanes<Real, lanes / 2> halves[2];
      std::memcpy(halves, &vectors[i], sizeof(halves));
      folded[i] = halves[0] + halves[1];
    }
    SumsOfLanes<Real, lanes / 2>(folded, sums);
  } else if constexpr (lanes == 4) {
    using Four = Lanes<Real, 4>;
    const Four low01 = __builtin_shufflevector(vectors[0], vectors[1], 0, 4, 1, 5);
    const Four high01 = __builtin_shufflevector(vectors[0], vectors[1], 2, 6, 3, 7);
    const Four low23 = __builtin_shufflevector(vectors[2], vectors[3], 0, 4, 1, 5);
    const Four high23 = __builtin_shufflevector(vectors[2], vectors[3], 2, 6, 3, 7);
    const Four of01 = low01 + high01, of23 = low23 + high23;  // lanes 0 + 2 of each, 1 + 3 of each
    const Four first = __builtin_shufflevector(of01, of23, 0, 1, 4, 5);
    const Four second = __builtin_shufflevector(of01, of23, 2, 3, 6, 7);
    StoreLanes<Four>(first + second, sums);
  } else {
    for (int i = 0; i < 4; ++i) sums[i] = SumOfLanes<Real, lanes>(vectors[i]);
  }
}

// A block of dot products: `columns` rows of the weights with `rows` of the operand.
template <typename Real, int rows, int columns>
void DotBlock(const Real* operand, int64_t operand_stride, const Real* weights,
              int64_t weights_stride, int64_t depth, Real* target, int64_t target_stride,
              bool accumulate) {
  constexpr int lanes = kLanes<Real>;
  Vector<Real> sums[rows][columns];
#pragma GCC unroll 4
  for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 8
    for (int i = 0; i < columns; ++i) sums[row][i] = Vector<Real>{};
  }
  int64_t k = 0;
  for (; k + lanes <= depth; k += lanes) {
    Vector<Real> loaded[columns];
#pragma GCC unroll 8
    for (int i = 0; i < columns; ++i) loaded[i] = Load(weights + i * weights_stride + k);
#pragma GCC unroll 4
    for (int row = 0; row < rows; ++row) {
      const Vector<Real> factor = Load(operand + row * operand_stride + k);
#pragma GCC unroll 8
      for (int i = 0; i < columns; ++i) sums[row][i] += loaded[i] * factor;
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < rows; ++row) {
    Real found[columns];
    if constexpr (columns % 4 == 0) {
#pragma GCC unroll 4
      for (int i = 0; i < columns; i += 4) {
        SumsOfLanes<Real, lanes>(sums[row] + i, found + i);
      }
    } else {
      for (int i = 0; i < columns; ++i) found[i] = SumOfLanes<Real, lanes>(sums[row][i]);
    }
    Real* place = target + row * target_stride;
#pragma GCC unroll 8
    for (int i = 0; i < columns; ++i) {
      for (int64_t rest = k; rest < depth; ++rest) {
        found[i] += operand[row * operand_stride + rest] * weights[i * weights_stride + rest];
      }
      place[i] = accumulate ? place[i] + found[i] : found[i];
    }
  }
}

constexpr int kDotRows = TFMEM_VECTOR_BYTES == 64 ? 4 : 2;

template <typename Real>
void MultiplyTransposed(const Real* operand, int64_t operand_stride, int64_t rows,
                        const Real* weights, int64_t weights_stride, int64_t columns, int64_t depth,
                        Real* target, int64_t target_stride, bool accumulate) {
  int64_t column = 0;
  const auto block = [&](auto width) {
    constexpr int kColumns = decltype(width)::value;
    const Real* begin = weights + column * weights_stride;
    int64_t row = 0;
    for (; row + kDotRows <= rows; row += kDotRows) {
      DotBlock<Real, kDotRows, kColumns>(
          operand + row * operand_stride, operand_stride, begin, weights_stride, depth,
          target + row * target_stride + column, target_stride, accumulate);
    }
    if (row + 2 <= rows) {
      DotBlock<Real, 2, kColumns>(operand + row * operand_stride, operand_stride, begin,
                                  weights_stride, depth, target + row * target_stride + column,
                                  target_stride, accumulate);
      row += 2;
    }
    if (row < rows) {
      DotBlock<Real, 1, kColumns>(operand + row * operand_stride, operand_stride, begin,
                                  weights_stride, depth, target + row * target_stride + column,
                                  target_stride, accumulate);
    }
    column += kColumns;
  };
  if (rows == 1) {  // whose sums alone would wait for each other
    while (column + 8 <= columns) block(std::integral_constant<int, 8>());
  }
  while (column + 4 <= columns) block(std::integral_constant<int, 4>());
  while (column < columns) block(std::integral_constant<int, 1>());
}

// ---- products of matrices that are read where they lie ----

template <typename Real, int rows, int vectors, bool ahead>
void StridedBlock(const Real* operand, int64_t row_stride, int64_t depth_stride,
                  const Real* weights, int64_t weights_stride, int64_t depth, const Real* next,
                  Real* target, int64_t target_stride, int64_t columns, bool accumulate) {
  constexpr int lanes = kLanes<Real>;
  Vector<Real> sums[rows][vectors];
#pragma GCC unroll 8
  for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 4
    for (int i = 0; i < vectors; ++i) sums[row][i] = Vector<Real>{};
  }
  for (int64_t k = 0; k < depth; ++k, weights += weights_stride, operand += depth_stride) {
    Vector<Real> loaded[vectors];
#pragma GCC unroll 4
    for (int i = 0; i < vectors; ++i) {
      loaded[i] = Load(weights + i * lanes);
      if constexpr (ahead) __builtin_prefetch(next + i * lanes);
    }
    if constexpr (ahead) next += weights_stride;
#pragma GCC unroll 8
    for (int row = 0; row < rows; ++row) {
      const Real factor = operand[row * row_stride];
#pragma GCC unroll 4
      for (int i = 0; i < vectors; ++i) sums[row][i] += loaded[i] * factor;
    }
  }
  if (columns == vectors * lanes) {
#pragma GCC unroll 8
    for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 4
      for (int i = 0; i < vectors; ++i) {
        Real* place = target + row * target_stride + i * lanes;
        Store<Real>(accumulate ? Load(place) + sums[row][i] : sums[row][i], place);
      }
    }
    return;
  }
  Real found[rows * vectors * lanes];
#pragma GCC unroll 8
  for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 4
    for (int i = 0; i < vectors; ++i)
      Store<Real>(sums[row][i], found + (row * vectors + i) * lanes);
  }
  for (int row = 0; row < rows; ++row) {
    Real* place = target + row * target_stride;
    for (int64_t i = 0; i < columns; ++i) {
      const Real sum = found[row * vectors * lanes + i];
      place[i] = accumulate ? place[i] + sum : sum;
    }
  }
}

template <typename Real, int most, int vectors>
TFMEM_INLINE void StridedRows(int64_t rows, const Real* operand, int64_t row_stride,
                              int64_t depth_stride, const Real* weights, int64_t weights_stride,
                              int64_t depth, const Real* next, Real* target, int64_t target_stride,
                              int64_t columns, bool accumulate) {
  if constexpr (most > 1) {
    if (rows < most) {
      return StridedRows<Real, most - 1, vectors>(rows, operand, row_stride, depth_stride, weights,
                                                  weights_stride, depth, next, target,
                                                  target_stride, columns, accumulate);
    }
  }
  (next != nullptr ? StridedBlock<Real, most, vectors, true>
                   : StridedBlock<Real, most, vectors, false>)(operand, row_stride, depth_stride,
                                                               weights, weights_stride, depth, next,
                                                               target, target_stride, columns,
                                                               accumulate);
}

template <typename Real, int vectors>
void StridedPanel(const Real* operand, int64_t row_stride, int64_t depth_stride, int64_t rows,
                  const Real* weights, int64_t weights_stride, int64_t depth, const Real* next,
                  Real* target, int64_t target_stride, int64_t columns, bool accumulate) {
  for (int64_t blocks = (rows + TFMEM_ROWS - 1) / TFMEM_ROWS; blocks > 0; --blocks) {
    const int64_t block = (rows + blocks - 1) / blocks;
    StridedRows<Real, TFMEM_ROWS, vectors>(block, operand, row_stride, depth_stride, weights,
                                           weights_stride, depth, next, target, target_stride,
                                           columns, accumulate);
    rows -= block;
    operand += block * row_stride;
    target += block * target_stride;
    next = nullptr;
  }
}

template <typename Real>
void MultiplyStrided(const Real* operand, int64_t row_stride, int64_t depth_stride, int64_t rows,
                     const Real* weights, int64_t weights_stride, int64_t depth, const Real* next,
                     Real* target, int64_t target_stride, int64_t columns, bool accumulate) {
  const int64_t vectors = (columns + kLanes<Real> - 1) / kLanes<Real>;
  (vectors == 1   ? StridedPanel<Real, 1>
   : vectors == 2 ? StridedPanel<Real, 2>
   : vectors == 3 ? StridedPanel<Real, 3>
                  : StridedPanel<Real, 4>)(operand, row_stride, depth_stride, rows, weights,
                                           weights_stride, depth, next, target, target_stride,
                                           columns, accumulate);
}
