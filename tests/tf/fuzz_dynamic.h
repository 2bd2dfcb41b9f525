// Dynamic nets by a text that may be damaged: batches that are random, valid or not, decoded, and
// run forward and backward on memory of exactly the sizes that they need; then with a script in
// which a word is changed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "custom_ops/ops/dynamic/batch.h"
#include "custom_ops/ops/dynamic/run.h"
#include "custom_ops/ops/dynamic/script.h"
#include "custom_ops/ops/dynamic/spec.h"
#include "fuzz_mutations.h"

namespace {

constexpr double kEveryProduct = -1e9, kNoProduct = 1e18;  // is dealt

struct DynamicCounts {
  int64_t texts = 0, taken = 0, run = 0, dealt = 0, scripts = 0, scripts_run = 0;
};

// Lists of a batch; `damaged` changes a number of them.
struct DynamicLists {
  std::vector<int32_t> kinds, children, arguments;
  std::vector<int64_t> kind_splits{0}, child_splits{0}, argument_splits{0};

  explicit DynamicLists(const tfmem::DynamicSpec& spec) {
    for (int64_t examples = Random(4); examples > 0; --examples) {
      std::vector<int> types;  // of the example's nodes so far
      for (int64_t tries = Random(12); tries > 0 && !spec.kinds.empty(); --tries) {
        const int64_t number = Random(spec.kinds.size());
        const tfmem::DynamicKind& kind = spec.kinds[number];
        std::vector<int32_t> below;
        for (int type : kind.children) {
          std::vector<int32_t> fitting;
          for (size_t i = 0; i < types.size(); ++i) {
            if (types[i] == type) fitting.push_back(i);
          }
          if (!fitting.empty()) below.push_back(OneOf(fitting));
        }
        if (below.size() < kind.children.size()) continue;
        kinds.push_back(number);
        types.push_back(kind.type);
        children.insert(children.end(), below.begin(), below.end());
        for (int64_t bound : kind.arguments) arguments.push_back(Random(bound));
      }
      kind_splits.push_back(kinds.size());
      child_splits.push_back(children.size());
      argument_splits.push_back(arguments.size());
    }
  }

  void Damage() {
    std::vector<int32_t>* lists[] = {&kinds, &children, &arguments};
    std::vector<int64_t>* splits[] = {&kind_splits, &child_splits, &argument_splits};
    const int64_t which = Random(3);
    if (Random(3) == 0) {
      OneOfThem(splits[which]) = Random(16) - 2;
    } else if (!lists[which]->empty()) {
      constexpr int32_t most = std::numeric_limits<int32_t>::max();
      const int64_t kind = Random(8);
      OneOfThem(lists[which]) = kind == 0 ? most : kind == 1 ? -most - 1 : Random(12) - 1;
    }
  }

  absl::StatusOr<tfmem::DynamicBatch> Decode(const tfmem::DynamicSpec& spec) const {
    return tfmem::DecodeBatch(spec, {kinds, kind_splits}, {children, child_splits},
                              {arguments, argument_splits});
  }

 private:
  template <typename T>
  static T& OneOfThem(std::vector<T>* list) {
    return (*list)[Random(list->size())];
  }
};

using Schedule = std::function<void(std::function<void()>)>;

class DynamicRunner {
 public:
  static constexpr int64_t kMost = 1 << 20;

  DynamicRunner(const tfmem::DynamicSpec& spec, const tfmem::DynamicBatch& batch)
      : spec_(spec),
        batch_(batch),
        layout_(*tfmem::DynamicLayout::Of(spec, batch)),
        found_(tfmem::FindLookedUp(spec, batch)) {
    for (const tfmem::LookedUp& table : found_) looked_up.push_back(table.rows());
  }

  bool small() const {
    int64_t numbers = layout_.floats + tfmem::ThreadFloats<float>(spec_, kernels_);
    for (const tfmem::DynamicParameter& parameter : spec_.parameters) {
      if (parameter.rows > kMost || parameter.columns > kMost) return false;
      numbers += 2 * parameter.elements();
    }
    return numbers < kMost;
  }

  // All gradients, behind each other.
  std::vector<float> Run(const tfmem::Script& script, int threads, const Schedule& schedule) {
    tfmem::DynamicCall<float> call{spec_, batch_, layout_, found_};
    std::vector<std::vector<float>> parameters, gradients;
    for (size_t i = 0; i < spec_.parameters.size(); ++i) {
      const tfmem::DynamicParameter& parameter = spec_.parameters[i];
      parameters.emplace_back(parameter.elements(), 0.5f);
      const int64_t rows = parameter.sparse ? looked_up[i] : parameter.rows;
      gradients.emplace_back(rows * parameter.columns, 0.0f);
    }
    for (const std::vector<float>& values : parameters) call.parameters.push_back(values.data());
    std::vector<float> memory(layout_.floats, 0.5f);
    const int64_t shared = script.deals ? tfmem::SharedFloats(spec_) : 0;
    std::vector<float> own(threads * tfmem::ThreadFloats<float>(spec_, kernels_) + shared, 0.5f);
    call.memory = memory.data();
    call.take = [&](int parameter, int64_t index, int64_t row, int64_t column, int64_t rows,
                    int64_t columns, const float* gradient, int64_t stride, float*) {
      const tfmem::DynamicParameter& shape = spec_.parameters[parameter];
      const int64_t first = shape.sparse ? index : row;
      for (int64_t i = 0; i < rows; ++i) {
        std::memcpy(gradients[parameter].data() + (first + i) * shape.columns + column,
                    gradient + i * stride, columns * sizeof(float));
      }
    };
    tfmem::RunScript(script, call, kernels_, threads, own.data(), schedule);
    std::vector<float> all;
    for (const auto& each : gradients) all.insert(all.end(), each.begin(), each.end());
    return all;
  }

  // Whether both compute the same, to the bit.
  bool IsAlike(const tfmem::Script& one, const tfmem::Script& other) {
    const auto never = [](std::function<void()>) {};
    const std::vector<float> first = Run(one, 1, never), second = Run(other, 1, never);
    return std::memcmp(first.data(), second.data(), first.size() * sizeof(float)) == 0;
  }

  std::vector<int64_t> looked_up;

 private:
  const tfmem::DynamicSpec& spec_;
  const tfmem::DynamicBatch& batch_;
  const tfmem::DynamicLayout layout_;
  const std::vector<tfmem::LookedUp> found_;
  const tfmem::InstructionSet& kernels_ = tfmem::ChosenKernels();
};

// A pool whose threads come at once. Those that leave may ask for others, at the same time.
class ThreadsAtOnce {
 public:
  void Begin(std::function<void()> closure) {
    std::lock_guard<std::mutex> lock(mutex_);
    threads_.emplace_back(std::move(closure));
  }

  // A thread has asked for others before it ends.
  void JoinAll() {
    for (;;) {
      std::thread thread;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (threads_.empty()) return;
        thread = std::move(threads_.back());
        threads_.pop_back();
      }
      thread.join();
    }
  }

 private:
  std::mutex mutex_;
  std::vector<std::thread> threads_;
};

// Threads of a pool that come at once, that come when all is over, or that never do: what is
// computed is the same, and no thread waits for them.
void RunEveryWay(DynamicRunner* runner, const tfmem::Script& script) {
  const auto never = [](std::function<void()>) {};
  const std::vector<float> expected = runner->Run(script, 1, never);
  std::vector<std::function<void()>> late;
  ThreadsAtOnce threads;
  const Schedule schedules[] = {
      never, [&](std::function<void()> closure) { late.push_back(std::move(closure)); },
      [&](std::function<void()> closure) { threads.Begin(std::move(closure)); }};
  const int64_t which = Random(20);  // threads are slow to begin
  const std::vector<float> found =
      runner->Run(script, 2 + Random(3), schedules[which == 0 ? 2 : which % 2]);
  for (const auto& closure : late) closure();
  threads.JoinAll();
  Expect(found.size() == expected.size() &&
             std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)) == 0,
         "a net's gradients do not depend on the threads");
}

void TryDynamic(DynamicCounts* counts) {
  ++counts->texts;
  const absl::StatusOr<tfmem::DynamicSpec> spec = tfmem::ParseDynamicSpec(current);
  if (!spec.ok()) return;
  ++counts->taken;
  DynamicLists lists(*spec);
  if (Random(3) == 0) lists.Damage();
  const absl::StatusOr<tfmem::DynamicBatch> batch = lists.Decode(*spec);
  if (!batch.ok()) return;
  DynamicRunner runner(*spec, *batch);
  if (!runner.small()) return;
  ++counts->run;
  tfmem::ScriptOptions options;
  options.forward = Random(4) != 0;
  options.backward = !options.forward || Random(4) != 0;
  options.processors = 1 + Random(4);
  options.worth_dealing = Random(2) != 0 ? kEveryProduct : kNoProduct;
  tfmem::Script script = tfmem::BuildScript(*spec, *batch, runner.looked_up, options);
  const absl::Status right = tfmem::CheckScript(*spec, *batch, runner.looked_up, script);
  Expect(right.ok(), std::string(right.message()).c_str());
  // As if every phase were long: short ones are the calling thread's alone.
  for (size_t phase = 0; phase < script.shared.size(); ++phase)
    script.shared[phase] = Random(4) != 0;
  RunEveryWay(&runner, script);
  options.worth_dealing = options.worth_dealing == kEveryProduct ? kNoProduct : kEveryProduct;
  const tfmem::Script other = tfmem::BuildScript(*spec, *batch, runner.looked_up, options);
  counts->dealt += script.deals || other.deals;
  Expect(runner.IsAlike(script, other),
         "a net's gradients do not depend on how products are dealt");
  std::vector<uint32_t>& words = script.processors[Random(options.processors)];
  if (words.empty()) return;
  ++counts->scripts;
  switch (Random(3)) {
    case 0:
      words[Random(words.size())] = Random(8);
      break;
    case 1:
      words[Random(words.size())] ^= uint32_t{1} << Random(32);
      break;
    default:
      words.erase(words.begin() + Random(words.size()));
  }
  if (!tfmem::CheckScript(*spec, *batch, runner.looked_up, script).ok()) return;
  ++counts->scripts_run;
  runner.Run(script, 1, [](std::function<void()>) {});
}

}  // namespace
