// Where the numbers of a sequence lie, for the kernels of TfmemRecurrent.
#pragma once

#include <cstdint>

namespace tfmem {

// A line is what a sequence has for one row of the batch in one step. How many lines there are from
// one step to the next, and from one row to the next.
struct SequenceLines {
  int64_t step = 0;
  int64_t row = 0;

  // The lines of [time, batch, ...], or of [batch, time, ...].
  static SequenceLines Of(int64_t time, int64_t batch, bool batch_major) {
    return batch_major ? SequenceLines{1, time} : SequenceLines{batch, 1};
  }

  int64_t At(int64_t time_index, int64_t batch_row) const {
    return time_index * step + batch_row * row;
  }
};

}  // namespace tfmem
