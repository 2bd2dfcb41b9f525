#include "custom_ops/ops/dynamic/run.h"

#include <algorithm>
#include <cstring>

#include "custom_ops/ops/cpu/phases.h"

namespace tfmem {
namespace {

using Where = StepPlace::Where;

template <typename Real>
constexpr DType kTypeOf = std::is_same_v<Real, float> ? DType::kFloat32 : DType::kFloat64;

constexpr int64_t kSplat = 64;  // numbers that stand for a constant

// A step of splitmix64: bits of a counter that look random.
uint64_t Mixed(uint64_t bits) {
  bits += 0x9E3779B97F4A7C15;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB;
  return bits ^ (bits >> 31);
}

}  // namespace

template <typename Real>
int64_t ThreadFloats(const DynamicSpec& spec, const InstructionSet& kernels) {
  const int64_t panel = KernelsOf<Real>(kernels).panel;
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

template <typename Real>
DynamicWorker<Real>::DynamicWorker(const DynamicCall<Real>& call, const InstructionSet& kernels,
                                   Real* own, Real* shared)
    : call_(call),
      set_(kernels),
      kernels_(KernelsOf<Real>(kernels)),
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

template <typename Real>
void DynamicWorker<Real>::Do(const uint32_t* words) {
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
template <typename Real>
Real* DynamicWorker<Real>::At(const Block& block, const StepPlace& place) const {
  if (place.where == Where::kScratch) return block.scratch + scratch_[block.kind][place.number];
  const int64_t stride = StrideOf(call_.spec.kinds[block.kind].kept[place.number]);
  return call_.memory + call_.layout.kept[block.kind][place.number] + block.first * stride;
}

template <typename Real>
void DynamicWorker<Real>::Run(const Block& block, const DynamicKind& kind,
                              const DynamicStep& step) {
  const KindRows& nodes = call_.batch.kinds[block.kind];
  const std::vector<int64_t>& n = step.numbers;
  const int64_t width = step.width, stride = StrideOf(width);
  Real* target = step.target.where == Where::kNone ? nullptr : At(block, step.target);
  const auto each_row = [&](auto source_of) {
    for (int64_t row = 0; row < block.rows; ++row) {
      std::memcpy(target + row * stride, source_of(block.first + row), width * sizeof(Real));
    }
  };
  // Rows of a value to where the layout has the kind's or the type's.
  const auto put = [&](int64_t place, const std::vector<int32_t>* rows) {
    const Real* source = At(block, step.values[0]);
    for (int64_t row = 0; row < block.rows; ++row) {
      const int64_t to = rows == nullptr ? block.first + row : (*rows)[block.first + row];
      std::memcpy(call_.memory + place + to * stride, source + row * stride, width * sizeof(Real));
    }
  };
  switch (step.op) {
    case StepOp::kChild: {
      const Real* states = call_.memory + call_.layout.states[kind.children[n[0]]][n[1]];
      each_row([&](int64_t row) { return states + nodes.children[n[0]][row] * stride; });
      break;
    }
    case StepOp::kLookup: {
      const int64_t columns = call_.spec.parameters[n[0]].columns;
      const Real* table = call_.parameters[n[0]] + n[2];
      each_row([&](int64_t row) { return table + nodes.arguments[n[1]][row] * columns; });
      break;
    }
    case StepOp::kRow:
      each_row([&](int64_t) { return call_.parameters[n[0]] + n[1]; });
      break;
    case StepOp::kOneHot:
      for (int64_t row = 0; row < block.rows; ++row) {
        const int64_t chosen = nodes.arguments[n[0]][block.first + row];
        std::fill_n(target + row * stride, width, Real{0});
        if (chosen < width) target[row * stride + chosen] = Real{1};
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
      const Real* source = constant ? nullptr : At(block, step.values[0]);
      for (int64_t row = 0; row < block.rows; ++row) {
        const Real value =
            constant ? static_cast<Real>(kind.constants[step.values[0].number]) : source[row];
        std::fill_n(target + row * stride, width, value);
      }
      break;
    }
    case StepOp::kConcat: {
      int64_t first = 0;
      for (size_t i = 0; i < step.values.size(); ++i) {
        const Real* source = At(block, step.values[i]);
        const int64_t part = step.widths[i];
        for (int64_t row = 0; row < block.rows; ++row) {
          std::memcpy(target + row * stride + first, source + row * StrideOf(part),
                      part * sizeof(Real));
        }
        first += part;
      }
      break;
    }
    case StepOp::kSlice: {
      const Real* source = At(block, step.values[0]) + n[0];
      const int64_t whole = StrideOf(step.widths[0]);
      for (int64_t row = 0; row < block.rows; ++row) {
        std::memcpy(target + row * stride, source + row * whole, width * sizeof(Real));
      }
      break;
    }
    case StepOp::kReduceSum:
    case StepOp::kReduceMax: {
      const Reduction kind_of = step.op == StepOp::kReduceSum ? Reduction::kSum : Reduction::kMax;
      const Real* source = At(block, step.values[0]);
      const int64_t whole = StrideOf(step.widths[0]);
      for (int64_t row = 0; row < block.rows; ++row) {
        set_.tile.reduce_columns(kind_of, kTypeOf<Real>, source + row * whole, 1, step.widths[0],
                                 target + row);
      }
      break;
    }
    case StepOp::kAdjoint:
      Adjoint(block, kind.type, step);
      break;
    case StepOp::kLossAdjoint:
      for (int64_t row = 0; row < block.rows; ++row) {
        const Real* gradients = call_.loss_gradients;
        target[row] = gradients == nullptr ? Real{1} : gradients[nodes.examples[block.first + row]];
      }
      break;
    case StepOp::kPutState:
      put(call_.layout.states[kind.type][n[0]], &nodes.states);
      break;
    case StepOp::kPutLoss:
      if (step.values[0].where == Where::kConstant) {
        std::fill_n(call_.memory + call_.layout.losses[block.kind] + block.first, block.rows,
                    static_cast<Real>(kind.constants[step.values[0].number]));
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

template <typename Real>
void DynamicWorker<Real>::Elementwise(const Block& block, const DynamicStep& step) {
  const Real* arguments[3] = {};
  int splats = 0;
  for (size_t i = 0; i < step.values.size(); ++i) {
    if (step.values[i].where == Where::kConstant) {
      Real* splat = splats_ + i * kSplat;
      const double number = call_.spec.kinds[block.kind].constants[step.values[i].number];
      std::fill_n(splat, kSplat, static_cast<Real>(number));
      arguments[i] = splat;
      splats |= 1 << i;
    } else {
      arguments[i] = At(block, step.values[i]);
    }
  }
  kernels_.compute(step.elementwise, At(block, step.target), arguments[0], arguments[1],
                   arguments[2], block.rows * StrideOf(step.width), splats);
}

template <typename Real>
void DynamicWorker<Real>::Random(const Block& block, const DynamicStep& step) {
  const KindRows& nodes = call_.batch.kinds[block.kind];
  Real* target = At(block, step.target);
  const int64_t stride = StrideOf(step.width);
  for (int64_t row = 0; row < block.rows; ++row) {
    const uint64_t stream = call_.seed ^ Mixed(step.numbers[0]);
    const uint64_t node = Mixed(stream + Mixed(nodes.nodes[block.first + row]));
    for (int64_t i = 0; i < step.width; ++i) {
      target[row * stride + i] = static_cast<Real>(Mixed(node + i) >> 40) * Real{0x1p-24};
    }
  }
}

// What the parents put, and what came from outside of the graph.
template <typename Real>
void DynamicWorker<Real>::Adjoint(const Block& block, int type, const DynamicStep& step) {
  const TypeRows& states = call_.batch.types[type];
  const KindRows& nodes = call_.batch.kinds[block.kind];
  const int64_t number = step.numbers[0], width = step.width, stride = StrideOf(width);
  const bool given = type == call_.gradient_type;
  Real* target = At(block, step.target);
  for (int64_t row = 0; row < block.rows; ++row, target += stride) {
    const int64_t state = nodes.states[block.first + row];
    bool begun = given;
    if (given) {
      std::memcpy(target, call_.state_gradients[number] + nodes.nodes[block.first + row] * width,
                  width * sizeof(Real));
    }
    for (int32_t i = states.first_parent[state]; i < states.first_parent[state + 1]; ++i) {
      const ParentEntry& parent = states.parents[i];
      const int64_t place = call_.layout.children[parent.kind][parent.slot][number];
      if (place < 0) continue;  // the parent does not use it
      const Real* source = call_.memory + place + parent.row * stride;
      if (begun) {
        kernels_.compute(Elementwise::kAdd, target, target, source, nullptr, width, 0);
      } else {
        std::memcpy(target, source, width * sizeof(Real));
        begun = true;
      }
    }
    if (!begun) std::fill_n(target, width, Real{0});
  }
}

template <typename Real>
void RunScript(const Script& script, const DynamicCall<Real>& call, const InstructionSet& kernels,
               int threads, Real* own, const std::function<void(std::function<void()>)>& schedule) {
  const int processors = script.processors.size();
  const int64_t floats = ThreadFloats<Real>(call.spec, kernels);
  std::vector<DynamicWorker<Real>> workers;
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

template float* DynamicWorker<float>::At(const Block&, const StepPlace&) const;
template double* DynamicWorker<double>::At(const Block&, const StepPlace&) const;
template int64_t ThreadFloats<float>(const DynamicSpec&, const InstructionSet&);
template int64_t ThreadFloats<double>(const DynamicSpec&, const InstructionSet&);
template void RunScript(const Script&, const DynamicCall<float>&, const InstructionSet&, int,
                        float*, const std::function<void(std::function<void()>)>&);
template void RunScript(const Script&, const DynamicCall<double>&, const InstructionSet&, int,
                        double*, const std::function<void(std::function<void()>)>&);

}  // namespace tfmem
