// A GPU program of TfmemRecurrent: a kernel's image, and how a call is divided among its launches.
// custom_ops/recurrent/gpu_program.py writes it. Knows neither TensorFlow nor a driver.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "custom_ops/ops/cuda/kernel_image.h"
#include "custom_ops/ops/recurrent/sequence_lines.h"

namespace tfmem {

struct RecurrentProgram {
  KernelImage image;
  std::optional<KernelImage> fallback;  // computes what the kernel could not; of the same code
  int64_t rows = 1;                     // of the batch for one group of CTAs
  int64_t ctas = 1;                     // of a group
  int64_t scratch = 0;                  // global memory of a group, bytes; zero before every launch
  int64_t stages = 0;     // of a step, each a separate launch; 0: one launch for all steps
  int64_t max_batch = 0;  // the largest batch it was chosen for; 0: it stands in for others

  int64_t groups(int64_t batch, int64_t directions) const {
    return (batch + rows - 1) / rows * directions;
  }
};

// Reads an element of `programs` and its code (see ReadImage); InvalidArgument says what is wrong.
absl::StatusOr<RecurrentProgram> ReadRecurrentProgram(absl::string_view text,
                                                      absl::string_view code);

// The groups of one launch.
struct GroupRange {
  int64_t first = 0;
  int64_t count = 0;
};

// Cuts a call's groups into launches of at most `at_once`, and of what a grid may have.
std::vector<GroupRange> CutLaunches(int64_t groups, int64_t at_once);

// Which stage of which step each launch of a call of so many steps is for: one launch for all of
// them where there are no `stages`, and without steps the last stage, which puts out final states.
struct Turn {
  int64_t step = 0;
  int64_t stage = 0;
};
std::vector<Turn> Turns(int64_t time, int64_t stages);

// The kernel's parameter: 64-bit words, passed as one struct.
struct KernelParameter {
  std::vector<uint64_t> words;

  KernelParameter(int64_t time, int64_t batch, const SequenceLines& lines, uint64_t scratch,
                  uint64_t status, const std::vector<bool>& reverse);
  void SetGroups(int64_t first, int64_t total);
  void SetTurn(const Turn& turn);
  int64_t time() const { return static_cast<uint32_t>(words[0]); }
  // In the order of the cell: sequences, invariants, vectors, matrices, initial states, outputs and
  // finals of a direction, one after another.
  template <typename Pointer>
  void Add(const std::vector<Pointer>& pointers) {
    for (Pointer pointer : pointers) words.push_back(reinterpret_cast<uint64_t>(pointer));
  }
};

}  // namespace tfmem
