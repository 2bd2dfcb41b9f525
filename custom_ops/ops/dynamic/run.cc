#include "custom_ops/ops/dynamic/run.h"

#include <algorithm>
#include <cstring>

#include "custom_ops/ops/cpu/phases.h"

namespace tfmem {
namespace {

using Where = StepPlace::Where;

constexpr int64_t kSplat = 64;  // numbers that stand for a constant

// A step of splitmix64: bits of a counter that look random.
uint64_t Mixed(uint64_t bits) {
  bits += 0x9E3779B97F4A7C15;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB;
  return bits ^ (bits >> 31);
}

}  // namespace

int64_t ThreadFloats(const DynamicSpec& spec, const InstructionSet& kernels) {
  const int64_t panel = kernels.single_precision.panel;
  int64_t depth = kGradientRows * 256 / panel, most = 0;
  for (const DynamicKind& kind : spec.kinds) {
    int64_t floats = 0;
    for (int64_t width : kind.scratch) floats += StrideOf(width) * kBlockRows;
    most = std::max(most, floats);
    for (const auto& section : kind.sections) {
      for (const DynamicStep& step : section) {
        if (step.op == StepOp::kProduct) depth = std::max(depth, step.widths[0]);
      }
    }
  }
  return 3 * kSplat + depth * panel + kBlockRows * panel + (kGradientRows + 8) * kGradientColumns +
         most + kSlack;
}

int64_t SharedFloats(const DynamicSpec& spec) {
  int64_t floats = kSlack;
  for (const DynamicKind& kind : spec.kinds) {
    for (int64_t width : kind.scratch) floats += StrideOf(width) * kBlockRows;
  }
  return floats;
}

DynamicWorker::DynamicWorker(const DynamicCall& call, const InstructionSet& kernels, float* own,
                             float* shared)
    : call_(call),
      set_(kernels),
      kernels_(kernels.single_precision),
      panel_(kernels_.panel),
      own_(own),
      shared_(shared) {
  int64_t shared_floats = 0;
  int64_t depth = kGradientRows * 256 / panel_;
  for (const DynamicKind& kind : call.spec.kinds) {
    scratch_.emplace_back();
    int64_t at = 0;
    for (int64_t width : kind.scratch) {
      scratch_.back().push_back(at);
      at += StrideOf(width) * kBlockRows;
    }
    shared_first_.push_back(shared_floats);
    shared_floats += at;
    for (const auto& section : kind.sections) {
      for (const DynamicStep& step : section) {
        if (step.op == StepOp::kProduct) depth = std::max(depth, step.widths[0]);
      }
    }
  }
  splats_ = own_;
  packed_ = splats_ + 3 * kSplat;
  partial_ = packed_ + depth * panel_;
  tile_ = partial_ + kBlockRows * panel_;
  values_ = tile_ + (kGradientRows + 8) * kGradientColumns;
}

void DynamicWorker::Do(const uint32_t* words) {
  switch (OpOf(words[0])) {
    case ScriptOp::kRun: {
      const Block block{static_cast<int>(words[1] & 0xFFFF), words[2], words[3], values_};
      const DynamicKind& kind = call_.spec.kinds[block.kind];
      for (uint32_t section = words[1] >> 16 & 0xFF; section <= words[1] >> 24; ++section) {
        for (const DynamicStep& step : kind.sections[section]) Run(block, kind, step);
      }
      break;
    }
    case ScriptOp::kSteps:
    case ScriptOp::kColumns: {
      const int kind_number = words[1] & 0xFFFF;
      const Block block{kind_number, words[3], words[4], shared_ + shared_first_[kind_number]};
      const DynamicKind& kind = call_.spec.kinds[kind_number];
      const std::vector<DynamicStep>& steps = kind.sections[words[1] >> 16];
      for (uint32_t step = words[2] & 0xFFFF; step < words[2] >> 16; ++step) {
        if (OpOf(words[0]) == ScriptOp::kSteps) {
          Run(block, kind, steps[step]);
        } else {
          Columns(block, steps[step], words[5] & 0xFFFF, words[5] >> 16);
        }
      }
      break;
    }
    case ScriptOp::kGradient:
      Gradient(words[1], words[2] * kGradientRows, words[3] * kGradientColumns);
      break;
    default:
      SumRows(words[1], words[2], words[3]);
  }
}

// The first row of a value in a block.
float* DynamicWorker::At(const Block& block, const StepPlace& place) const {
  if (place.where == Where::kScratch) return block.scratch + scratch_[block.kind][place.number];
  const int64_t stride = StrideOf(call_.spec.kinds[block.kind].kept[place.number]);
  return call_.memory + call_.layout.kept[block.kind][place.number] + block.first * stride;
}

void DynamicWorker::Run(const Block& block, const DynamicKind& kind, const DynamicStep& step) {
  const KindRows& nodes = call_.batch.kinds[block.kind];
  const std::vector<int64_t>& n = step.numbers;
  const int64_t width = step.width, stride = StrideOf(width);
  float* target = step.target.where == Where::kNone ? nullptr : At(block, step.target);
  const auto each_row = [&](auto source_of) {
    for (int64_t row = 0; row < block.rows; ++row) {
      std::memcpy(target + row * stride, source_of(block.first + row), width * sizeof(float));
    }
  };
  // Rows of a value to where the layout has the kind's or the type's.
  const auto put = [&](int64_t place, const std::vector<int32_t>* rows) {
    const float* source = At(block, step.values[0]);
    for (int64_t row = 0; row < block.rows; ++row) {
      const int64_t to = rows == nullptr ? block.first + row : (*rows)[block.first + row];
      std::memcpy(call_.memory + place + to * stride, source + row * stride, width * sizeof(float));
    }
  };
  switch (step.op) {
    case StepOp::kChild: {
      const float* states = call_.memory + call_.layout.states[kind.children[n[0]]][n[1]];
      each_row([&](int64_t row) { return states + nodes.children[n[0]][row] * stride; });
      break;
    }
    case StepOp::kLookup: {
      const int64_t columns = call_.spec.parameters[n[0]].columns;
      const float* table = call_.parameters[n[0]] + n[2];
      each_row([&](int64_t row) { return table + nodes.arguments[n[1]][row] * columns; });
      break;
    }
    case StepOp::kRow:
      each_row([&](int64_t) { return call_.parameters[n[0]] + n[1]; });
      break;
    case StepOp::kOneHot:
      for (int64_t row = 0; row < block.rows; ++row) {
        const int64_t chosen = nodes.arguments[n[0]][block.first + row];
        std::fill_n(target + row * stride, width, 0.0f);
        if (chosen < width) target[row * stride + chosen] = 1.0f;
      }
      break;
    case StepOp::kRandom:
      Random(block, step);
      break;
    case StepOp::kProduct:
      Product(block, step, 0, width);
      break;
    case StepOp::kBroadcast: {
      const bool constant = step.values[0].where == Where::kConstant;
      const float* source = constant ? nullptr : At(block, step.values[0]);
      for (int64_t row = 0; row < block.rows; ++row) {
        const float value = constant ? kind.constants[step.values[0].number] : source[row];
        std::fill_n(target + row * stride, width, value);
      }
      break;
    }
    case StepOp::kConcat: {
      int64_t first = 0;
      for (size_t i = 0; i < step.values.size(); ++i) {
        const float* source = At(block, step.values[i]);
        const int64_t part = step.widths[i];
        for (int64_t row = 0; row < block.rows; ++row) {
          std::memcpy(target + row * stride + first, source + row * StrideOf(part),
                      part * sizeof(float));
        }
        first += part;
      }
      break;
    }
    case StepOp::kSlice: {
      const float* source = At(block, step.values[0]) + n[0];
      const int64_t whole = StrideOf(step.widths[0]);
      for (int64_t row = 0; row < block.rows; ++row) {
        std::memcpy(target + row * stride, source + row * whole, width * sizeof(float));
      }
      break;
    }
    case StepOp::kReduceSum:
    case StepOp::kReduceMax: {
      const Reduction kind_of = step.op == StepOp::kReduceSum ? Reduction::kSum : Reduction::kMax;
      const float* source = At(block, step.values[0]);
      const int64_t whole = StrideOf(step.widths[0]);
      for (int64_t row = 0; row < block.rows; ++row) {
        set_.tile.reduce_columns(kind_of, DType::kFloat32, source + row * whole, 1, step.widths[0],
                                 target + row);
      }
      break;
    }
    case StepOp::kAdjoint:
      Adjoint(block, kind.type, step);
      break;
    case StepOp::kLossAdjoint:
      for (int64_t row = 0; row < block.rows; ++row) {
        const float* gradients = call_.loss_gradients;
        target[row] = gradients == nullptr ? 1.0f : gradients[nodes.examples[block.first + row]];
      }
      break;
    case StepOp::kPutState:
      put(call_.layout.states[kind.type][n[0]], &nodes.states);
      break;
    case StepOp::kPutLoss:
      if (step.values[0].where == Where::kConstant) {
        std::fill_n(call_.memory + call_.layout.losses[block.kind] + block.first, block.rows,
                    kind.constants[step.values[0].number]);
      } else {
        put(call_.layout.losses[block.kind], nullptr);
      }
      break;
    case StepOp::kPutOutput:
      put(call_.layout.outputs[block.kind][n[0]], nullptr);
      break;
    case StepOp::kPutChild:
      put(call_.layout.children[block.kind][n[0]][n[1]], nullptr);
      break;
    case StepOp::kElementwise:
      Elementwise(block, step);
      break;
    default:
      break;  // of the last section, whose instructions are others
  }
}

void DynamicWorker::Elementwise(const Block& block, const DynamicStep& step) {
  const float* arguments[3] = {};
  int splats = 0;
  for (size_t i = 0; i < step.values.size(); ++i) {
    if (step.values[i].where == Where::kConstant) {
      float* splat = splats_ + i * kSplat;
      std::fill_n(splat, kSplat, call_.spec.kinds[block.kind].constants[step.values[i].number]);
      arguments[i] = splat;
      splats |= 1 << i;
    } else {
      arguments[i] = At(block, step.values[i]);
    }
  }
  kernels_.compute(step.elementwise, At(block, step.target), arguments[0], arguments[1],
                   arguments[2], block.rows * StrideOf(step.width), splats);
}

void DynamicWorker::Random(const Block& block, const DynamicStep& step) {
  const KindRows& nodes = call_.batch.kinds[block.kind];
  float* target = At(block, step.target);
  const int64_t stride = StrideOf(step.width);
  for (int64_t row = 0; row < block.rows; ++row) {
    const uint64_t stream = call_.seed ^ Mixed(step.numbers[0]);
    const uint64_t node = Mixed(stream + Mixed(nodes.nodes[block.first + row]));
    for (int64_t i = 0; i < step.width; ++i) {
      target[row * stride + i] = static_cast<float>(Mixed(node + i) >> 40) * 0x1p-24f;
    }
  }
}

// What the parents put, and what came from outside of the graph.
void DynamicWorker::Adjoint(const Block& block, int type, const DynamicStep& step) {
  const TypeRows& states = call_.batch.types[type];
  const KindRows& nodes = call_.batch.kinds[block.kind];
  const int64_t number = step.numbers[0], width = step.width, stride = StrideOf(width);
  const bool given = type == call_.gradient_type;
  float* target = At(block, step.target);
  for (int64_t row = 0; row < block.rows; ++row, target += stride) {
    const int64_t state = nodes.states[block.first + row];
    bool begun = given;
    if (given) {
      std::memcpy(target, call_.state_gradients[number] + nodes.nodes[block.first + row] * width,
                  width * sizeof(float));
    }
    for (int32_t i = states.first_parent[state]; i < states.first_parent[state + 1]; ++i) {
      const ParentEntry& parent = states.parents[i];
      const int64_t place = call_.layout.children[parent.kind][parent.slot][number];
      if (place < 0) continue;  // the parent does not use it
      const float* source = call_.memory + place + parent.row * stride;
      if (begun) {
        kernels_.compute(Elementwise::kAdd, target, target, source, nullptr, width, 0);
      } else {
        std::memcpy(target, source, width * sizeof(float));
        begun = true;
      }
    }
    if (!begun) std::fill_n(target, width, 0.0f);
  }
}

void RunScript(const Script& script, const DynamicCall& call, const InstructionSet& kernels,
               int threads, float* own,
               const std::function<void(std::function<void()>)>& schedule) {
  const int processors = script.processors.size();
  const int64_t floats = ThreadFloats(call.spec, kernels);
  std::vector<DynamicWorker> workers;
  for (int thread = 0; thread < threads; ++thread) {
    workers.emplace_back(call, kernels, own + thread * floats,
                         script.deals ? own + threads * floats : nullptr);
  }
  std::vector<size_t> at(processors);  // of each virtual processor: its next word
  const auto run = [&](int processor, int thread) {
    const std::vector<uint32_t>& words = script.processors[processor];
    size_t next = at[processor];
    for (;; next += WordsOf(words[next])) {
      const ScriptOp op = OpOf(words[next]);
      if (op == ScriptOp::kSignal) break;
      if (op != ScriptOp::kWait) workers[thread].Do(words.data() + next);
    }
    at[processor] = next + WordsOf(words[next]);
  };
  // The first processor runs some phases alone; no other thread is scheduled to spin there.
  for (int phase = 0; phase < script.phases;) {
    int end = phase + 1;
    while (end < script.phases && script.shared[end] == script.shared[phase]) ++end;
    RunPhases(end - phase, processors, script.shared[phase] ? threads : 1, schedule,
              ThreadWork([&](int64_t, int processor, int thread) { run(processor, thread); }));
    phase = end;
  }
}

}  // namespace tfmem
