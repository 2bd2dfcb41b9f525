// Programs over tensors for tests, through ctypes (tile_programs.py): functions of the op library
// that is loaded. Functions that can fail put a message into `error`.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "custom_ops/ops/cpu/tile_run.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/platform/env.h"
#include "tensorflow/core/platform/threadpool.h"
#include "tile_text.h"

namespace {

using tfmem::PreparedExpression;

int Fail(const absl::Status& status, char* error, int64_t capacity) {
  const std::string message(status.message().substr(0, capacity - 1));
  std::memcpy(error, message.c_str(), message.size() + 1);
  return -1;
}

absl::Status CheckBytes(const char* what, const std::vector<int64_t>& found,
                        const std::vector<int64_t>& expected) {
  if (found == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("program: expected ", what, " of ",
                                                 absl::StrJoin(expected, ", "), " bytes, found ",
                                                 absl::StrJoin(found, ", ")));
}

}  // namespace

extern "C" {

// A program over tensors made ready for sizes; nullptr if it cannot be. `shapes` are those of the
// inputs one after the other.
void* tfmem_prepare_program(const char* text, int64_t length, const int64_t* axes,
                            int64_t axis_count, const int64_t* ranks, const int64_t* shapes,
                            int64_t input_count, char* error, int64_t capacity) {
  const auto prepare = [&]() -> absl::StatusOr<std::unique_ptr<const PreparedExpression>> {
    TFMEM_ASSIGN_OR_RETURN(const tfmem::Expression expression,
                           tfmem::ParseExpression(absl::string_view(text, length)));
    std::vector<tfmem::Shape> read(input_count);
    for (int64_t i = 0; i < input_count; ++i) {
      read[i].assign(shapes, shapes + ranks[i]);
      shapes += ranks[i];
    }
    return PreparedExpression::Prepare(expression, {axes, axes + axis_count}, read,
                                       tfmem::ChosenKernels());
  };
  auto prepared = prepare();
  if (prepared.ok()) return const_cast<PreparedExpression*>(prepared->release());
  Fail(prepared.status(), error, capacity);
  return nullptr;
}

// The tile program of what was prepared, for people; returns how many characters it has, of which
// at most `capacity` are copied.
int64_t tfmem_show_program(const void* program, char* text, int64_t capacity) {
  const std::string shown =
      tfmem::ToText(static_cast<const PreparedExpression*>(program)->program());
  const int64_t count = shown.size();
  std::copy_n(shown.begin(), std::min(count, capacity), text);
  return count;
}

bool tfmem_program_may_share(const void* program, int input, int output) {
  return static_cast<const PreparedExpression*>(program)->MayShare(input, output);
}

void tfmem_free_program(void* program) { delete static_cast<PreparedExpression*>(program); }

// Runs what was prepared `times` times on `threads` threads, over tensors of these sizes.
int tfmem_run_program(const void* program, const void** inputs, const int64_t* input_bytes,
                      int64_t input_count, void** outputs, const int64_t* output_bytes,
                      int64_t output_count, int threads, int64_t times, char* error,
                      int64_t capacity) {
  const auto& prepared = *static_cast<const PreparedExpression*>(program);
  absl::Status status =
      CheckBytes("inputs", {input_bytes, input_bytes + input_count}, prepared.input_bytes());
  status.Update(
      CheckBytes("outputs", {output_bytes, output_bytes + output_count}, prepared.output_bytes()));
  if (!status.ok()) return Fail(status, error, capacity);
  std::unique_ptr<tensorflow::thread::ThreadPool> pool;
  tfmem::TileThreads team;
  if (threads > 1) {
    team.count = threads;
    pool = std::make_unique<tensorflow::thread::ThreadPool>(tensorflow::Env::Default(), "tfmem",
                                                            threads);
    team.schedule = [&pool](std::function<void()> closure) { pool->Schedule(std::move(closure)); };
  }
  for (int64_t i = 0; i < times; ++i) {
    status = prepared.Run(absl::MakeConstSpan(inputs, input_count),
                          absl::MakeConstSpan(outputs, output_count), team, nullptr);
    if (!status.ok()) return Fail(status, error, capacity);
  }
  return 0;
}

}  // extern "C"
