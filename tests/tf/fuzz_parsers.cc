// Mutated cells, GPU programs, programs over tensors and dynamic nets, parsed, compiled and run:
// under AddressSanitizer and UndefinedBehaviorSanitizer, tests/tf/fuzz_parsers.py builds and runs
// it.
//
//   fuzz_parsers CORPUS INPUTS SEED
//
// CORPUS holds valid texts, each behind a line "cell LENGTH", "program LENGTH", "expression LENGTH"
// or "dynamic LENGTH". An input that ends the process is printed. What is accepted runs on tensors
// of exactly the sizes that it declares.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "custom_ops/ops/cpu/expression_tiles.h"
#include "custom_ops/ops/cpu/tile_run.h"
#include "custom_ops/ops/recurrent/cell.h"
#include "custom_ops/ops/recurrent/recurrent_program.h"
#include "custom_ops/ops/recurrent/recurrent_run.h"
#include "custom_ops/ops/recurrent/step_program.h"
#include "custom_ops/ops/sizes.h"
#include "fuzz_dynamic.h"
#include "fuzz_mutations.h"
#include "tile_check.h"

extern "C" void __sanitizer_set_death_callback(void (*callback)());

namespace {

using tfmem::Cell;
using tfmem::Size;

constexpr int64_t kMostNumbers = 1 << 14;  // of the tensors of a cell that is run

struct Corpus {
  std::vector<std::string> cells;
  std::vector<std::string> programs;
  std::vector<std::string> expressions;
  std::vector<std::string> dynamic;
};

Corpus ReadCorpus(const char* path) {
  Corpus corpus;
  std::ifstream file(path, std::ios::binary);
  std::string kind;
  size_t length = 0;
  while (file >> kind >> length) {
    file.get();
    std::string text(length, '\0');
    file.read(text.data(), length);
    (kind == "cell"      ? corpus.cells
     : kind == "program" ? corpus.programs
     : kind == "dynamic" ? corpus.dynamic
                         : corpus.expressions)
        .push_back(text);
  }
  return corpus;
}

// Tensors, each in a separate block, so that a read past one is found.
class Tensors {
 public:
  float* Add(Size numbers) {
    total_ = total_ + numbers;
    if (!total_.ok() || total_.value() > kMostNumbers) return nullptr;
    blocks_.emplace_back(new float[numbers.value()]);
    std::fill_n(blocks_.back().get(), numbers.value(), 0.5f);
    return blocks_.back().get();
  }
  bool small() const { return total_.ok() && total_.value() <= kMostNumbers; }

 private:
  Size total_ = 0;
  std::vector<std::unique_ptr<float[]>> blocks_;
};

// Whether it ran; not if its tensors would be large.
bool Run(const Cell& cell, const tfmem::StepProgram& program) {
  tfmem::RecurrentAttributes attributes;
  attributes.cell = cell;
  attributes.units = OneOf<int64_t>({1, 2, 5, 17, 33});
  attributes.directions = 1 + Random(2);
  attributes.batch_major = Random(2) == 0;
  tfmem::RecurrentCall call;
  call.time = Random(4);
  call.batch = 1 + Random(5);
  call.batch_major = attributes.batch_major;
  const Size units = attributes.units, rows = call.batch, lines = rows * call.time;
  Tensors tensors;
  auto add = [&](auto* list, Size numbers) { list->push_back(tensors.Add(numbers)); };
  for (int direction = 0; direction < attributes.directions; ++direction) {
    tfmem::RecurrentDirection data;
    data.reverse = Random(2) == 0;
    for (int columns : cell.sequences) {
      add(&data.sequences, columns == 0 ? lines : lines * columns * units);
    }
    for (int columns : cell.invariants) add(&data.invariants, rows * columns * units);
    for (int columns : cell.vectors) add(&data.vectors, units * columns);
    for (const tfmem::CellMatrix& matrix : cell.matrices) {
      add(&data.matrices, units * matrix.rows * units * matrix.columns);
    }
    for (size_t state = 0; state < cell.states.size(); ++state) {
      add(&data.initials, rows * units);
      add(&data.finals, rows * units);
      if (Random(4) == 0) data.initials.back() = nullptr;
    }
    for (size_t output = 0; output < cell.outputs.size(); ++output) {
      const int64_t columns = cell.outputs[output].size();
      add(&data.outputs, cell.scalar_output(output) ? lines : lines * columns * units);
    }
    call.directions.push_back(std::move(data));
  }
  if (!tensors.small()) return false;
  const int threads = 1 + Random(4);
  tfmem::RecurrentRun<float> run(attributes, program, call, tfmem::ChosenKernels(), threads);
  const int64_t bytes = run.workspace.bytes();
  Expect(bytes >= 0, "the workspace of small tensors has a size");
  std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(64, bytes + 64), std::free);
  run.workspace.Set(memory.get());
  for (int64_t phase = 0; phase < run.phases(); ++phase) {
    for (int share = 0; share < run.cut.shares(); ++share) run.Work(phase, share);
  }
  return true;
}

// Whether it ran, on tensors of exactly the sizes that it reads: mostly those of the corpus.
bool Run(const tfmem::Expression& expression) {
  std::vector<int64_t> axes;
  Size numbers = 1;
  for (int64_t size : expression.axes) {
    axes.push_back(size == 0 ? OneOf<int64_t>({0, 1, 2, 3, 5, 70}) : size);
    numbers = numbers * std::max<int64_t>(axes.back(), 1);
  }
  if (!numbers.ok() || numbers.value() > kMostNumbers) return false;
  std::vector<std::unique_ptr<char[]>> blocks;
  auto add = [&](int64_t bytes) {
    blocks.emplace_back(new char[bytes]);
    for (int64_t i = 0; i < bytes; ++i) blocks.back()[i] = static_cast<char>(Random(2));
    return blocks.back().get();
  };
  std::vector<tfmem::Shape> shapes(expression.tensors.size());
  std::vector<const void*> inputs;
  for (size_t i = 0; i < shapes.size(); ++i) {
    int64_t bytes = tfmem::TensorBytes(expression.tensors[i].dtype);
    for (int d = 0; d < expression.tensors[i].rank; ++d) {
      // As large as the largest index.
      int64_t end = 1;
      for (const tfmem::ExpressionNode& node : expression.nodes) {
        const bool draws = node.kind == tfmem::ExpressionNode::Kind::kRandom;
        if (draws && node.counter == static_cast<int>(i)) end = 2;
        if (node.kind != tfmem::ExpressionNode::Kind::kInput) continue;
        if (node.tensor != static_cast<int>(i)) continue;
        int64_t most = 0;
        for (const tfmem::IndexTerm& term : node.index[d].terms) {
          int64_t least = 0, largest = 0;
          const int64_t size = term.axis < 0 ? 1 : axes[term.axis];
          if (size > 0) term.Bounds(size, &least, &largest);
          most += largest;
        }
        end = std::max(end, most + 1);
      }
      if (end > kMostNumbers || bytes * end > kMostNumbers) return false;
      if (Random(50) == 0) end = Random(end + 1);
      shapes[i].push_back(end);
      bytes *= end;
    }
    inputs.push_back(add(bytes));
  }
  const auto sized = tfmem::SizeExpression(expression, axes, shapes);
  if (!sized.ok()) return false;
  const auto tiles = tfmem::CompileExpression(*sized, shapes.size());
  if (!tiles.ok()) return false;
  const absl::Status right = tfmem::CheckTileProgram(tiles->program);
  Expect(right.ok(), std::string(right.message()).c_str());
  const auto prepared =
      tfmem::PreparedExpression::Prepare(expression, axes, shapes, tfmem::ChosenKernels());
  std::vector<void*> outputs;
  for (int64_t bytes : (*prepared)->output_bytes()) outputs.push_back(add(bytes));
  return (*prepared)->Run(inputs, outputs, {}, nullptr).ok();
}

struct Counts {
  int64_t cells = 0, cells_taken = 0, cells_run = 0, programs = 0, programs_taken = 0;
  int64_t expressions = 0, expressions_taken = 0, expressions_run = 0;
  DynamicCounts dynamic;
};

void TryExpression(Counts* counts) {
  ++counts->expressions;
  const absl::StatusOr<tfmem::Expression> expression = tfmem::ParseExpression(current);
  if (!expression.ok()) return;
  ++counts->expressions_taken;
  counts->expressions_run += Run(*expression);
}

void TryCell(Counts* counts) {
  ++counts->cells;
  absl::StatusOr<Cell> cell = tfmem::ParseCell(current);
  if (!cell.ok() || cell->states.empty()) return;
  ++counts->cells_taken;
  counts->cells_run += Run(*cell, tfmem::CompileStep(*cell, tfmem::DType::kFloat32));
}

void TryProgram(Counts* counts) {
  ++counts->programs;
  absl::StatusOr<tfmem::RecurrentProgram> program = tfmem::ReadRecurrentProgram(current, "code");
  if (!program.ok()) return;
  ++counts->programs_taken;
  const int64_t most = tfmem::kMostOfASize;
  for (int64_t batch : {int64_t{0}, int64_t{1}, most}) {
    const int64_t groups = program->groups(batch, 64);
    Expect(groups >= 0 && groups <= most * 64, "there are no less than no groups");
    (void)(Size(groups) * program->scratch).ok();
    if (groups < 1 << 20) tfmem::CutLaunches(groups, most / program->ctas);
  }
  const std::vector<tfmem::Turn> turns = tfmem::Turns(3, program->stages);
  const size_t stages = program->stages;
  Expect(turns.size() == (stages == 0 ? 1 : 3 * stages), "a turn for each stage of each step");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const Corpus corpus = ReadCorpus(argv[1]);
  const int64_t inputs = std::atoll(argv[2]);
  random_source.seed(std::atoll(argv[3]));
  __sanitizer_set_death_callback(PrintInput);
  Counts counts;
  for (const std::string& text : corpus.cells) {
    current = text;
    TryCell(&counts);
  }
  for (const std::string& text : corpus.programs) {
    current = text;
    TryProgram(&counts);
  }
  for (const std::string& text : corpus.expressions) {
    current = text;
    TryExpression(&counts);
  }
  for (const std::string& text : corpus.dynamic) {
    current = text;
    TryDynamic(&counts.dynamic);
  }
  Expect(counts.dynamic.taken == counts.dynamic.texts && counts.cells_taken == counts.cells &&
             counts.programs_taken == counts.programs &&
             counts.expressions_taken == counts.expressions,
         "the texts that are mutated are valid");
  for (; inputs_done < inputs; ++inputs_done) {
    if (Random(4) == 0) {
      current =
          Random(3) == 0 ? OneOf(corpus.dynamic) : Mutate(OneOf(corpus.dynamic), corpus.dynamic);
      TryDynamic(&counts.dynamic);
      continue;
    }
    if (Random(3) == 0) {
      current = Mutate(OneOf(corpus.expressions), corpus.expressions);
      TryExpression(&counts);
      continue;
    }
    const bool cell = Random(4) != 0;
    current = cell ? Mutate(OneOf(corpus.cells), corpus.cells)
                   : Mutate(OneOf(corpus.programs), corpus.programs);
    cell ? TryCell(&counts) : TryProgram(&counts);
  }
  std::printf("%ld expressions, %ld taken, %ld run; ", static_cast<long>(counts.expressions),
              static_cast<long>(counts.expressions_taken),
              static_cast<long>(counts.expressions_run));
  std::printf("%ld nets, %ld taken, %ld run, %ld run dealt, %ld scripts changed, %ld of them run; ",
              static_cast<long>(counts.dynamic.texts), static_cast<long>(counts.dynamic.taken),
              static_cast<long>(counts.dynamic.run), static_cast<long>(counts.dynamic.dealt),
              static_cast<long>(counts.dynamic.scripts),
              static_cast<long>(counts.dynamic.scripts_run));
  std::printf("%ld inputs: %ld cells, %ld taken, %ld run; %ld programs, %ld taken\n",
              static_cast<long>(inputs), static_cast<long>(counts.cells),
              static_cast<long>(counts.cells_taken), static_cast<long>(counts.cells_run),
              static_cast<long>(counts.programs), static_cast<long>(counts.programs_taken));
  return 0;
}
