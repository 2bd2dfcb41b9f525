// Scripts of a dynamic net's batch for a GPU, each instruction damaged in every way that the
// checker knows: all are refused, and the script itself is not. Arguments: files of the spec's
// text, of a program's header and of its code. Prints what went wrong, and how many scripts of each
// op were refused; exit status 0 if nothing went wrong.
#include <cstdio>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "custom_ops/ops/dynamic/gpu_script.h"

namespace {

using tfmem::GpuOp;

constexpr int kGraphs =
    70;  // of two leaves and a pair, so that a level has more than a tile's rows
constexpr const char* kNames[] = {"",     "run",    "gradient", "rows", "signal",
                                  "wait", "gather", "losses",   "call", "multiply"};

std::string Contents(const char* path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <class T>
T Right(absl::StatusOr<T> found, const char* what) {
  if (!found.ok()) {
    std::fprintf(stderr, "%s: %s\n", what, std::string(found.status().message()).c_str());
    std::exit(2);
  }
  return *std::move(found);
}

}  // namespace

int main(int, char** paths) {
  const std::string text = Contents(paths[1]), code = Contents(paths[3]);
  const tfmem::DynamicSpec spec = Right(tfmem::ParseDynamicSpec(text), "spec");
  const tfmem::GpuProgram program =
      Right(tfmem::ReadGpuProgram(Contents(paths[2]), code, spec, text), "program");
  std::vector<int32_t> kinds, children, arguments;
  std::vector<int64_t> kind_splits{0}, child_splits{0}, argument_splits{0};
  for (int graph = 0; graph < kGraphs; ++graph) {
    kinds.insert(kinds.end(), {0, 0, 1});
    children.insert(children.end(), {0, 1});
    arguments.insert(arguments.end(), {graph % 9, 3, graph % 3});
    kind_splits.push_back(kinds.size());
    child_splits.push_back(children.size());
    argument_splits.push_back(arguments.size());
  }
  const tfmem::DynamicBatch batch =
      Right(tfmem::DecodeBatch(spec, {kinds, kind_splits}, {children, child_splits},
                               {arguments, argument_splits}),
            "batch");
  const tfmem::DynamicLayout layout = Right(tfmem::DynamicLayout::Of(spec, batch), "layout");
  const std::vector<tfmem::LookedUp> looked_up = tfmem::FindLookedUp(spec, batch);
  tfmem::GpuCall call;
  call.backward = true;
  call.state_type = 0;
  const tfmem::GpuSent sent =
      Right(tfmem::BuildGpuScript(spec, program, batch, layout, looked_up, call), "script");
  const auto check = [&](const tfmem::GpuSent& given) {
    return tfmem::CheckGpuScript(spec, program, batch, looked_up, given);
  };
  int failures = !check(sent).ok();
  if (failures) std::fprintf(stderr, "a right script is refused\n");

  // Sizes that 64 bits do not count are an error, whether they are the batch's or its spilled
  // values.
  tfmem::DynamicBatch large = batch;
  for (tfmem::KindRows& rows : large.kinds) rows.count = int64_t{1} << 57;
  if (!absl::IsInvalidArgument(tfmem::DynamicLayout::Of(spec, large).status())) {
    ++failures;
    std::fprintf(stderr, "a layout of more floats than 64 bits count is not refused\n");
  }
  tfmem::GpuProgram spills = program;
  for (auto& widths : spills.spilled) widths.assign(8, 1 << 20);
  large = batch;
  tfmem::DynamicLayout nearly = layout;
  nearly.floats = std::numeric_limits<int64_t>::max() - 100;
  spills.table += 8 * spills.spilled.size();
  if (tfmem::BuildGpuScript(spec, spills, large, nearly, looked_up, call).ok()) {
    ++failures;
    std::fprintf(stderr, "spilled values of more floats than 64 bits count are not refused\n");
  }

  // Without a gradient a parameter has no instruction in a step; a call that gives gradients has.
  tfmem::DynamicSpec frozen = spec;
  frozen.parameters[0].trained = false;
  for (const bool update : {false, true}) {
    tfmem::GpuCall again = call;
    again.update = update;
    const tfmem::GpuSent script =
        Right(tfmem::BuildGpuScript(frozen, program, batch, layout, looked_up, again), "frozen");
    bool named = false;
    for (uint32_t at = script.common; at < script.words.size(); at += script.words[at] >> 8) {
      const auto op = static_cast<GpuOp>(script.words[at] & 0xFF);
      named |= (op == GpuOp::kGradient || op == GpuOp::kSumRows) && script.words[at + 1] == 0;
    }
    if (named == update) {
      ++failures;
      std::fprintf(stderr, "the gradient of a parameter that is not trained, update %d\n", update);
    }
  }

  std::vector<int64_t> tiled;  // outputs of each segment that may be in tiles, else 0
  for (const auto& kind : program.segments) {
    for (const auto& section : kind) {
      for (const tfmem::GpuSegment& segment : section) {
        tiled.resize(std::max<size_t>(tiled.size(), segment.number + 1));
        tiled[segment.number] = segment.outputs;
      }
    }
  }
  const uint32_t segments = tiled.size(), parameters = spec.parameters.size();
  const uint32_t nodes = batch.nodes, examples = batch.examples;
  uint32_t plain = 0, sparse = 0, dense = 0;  // a segment without tiles, parameters of each kind
  while (tiled[plain] > 0) ++plain;
  while (!spec.parameters[sparse].sparse) ++sparse;
  while (spec.parameters[dense].sparse) ++dense;

  int refused[std::size(kNames)] = {};
  const uint32_t end = sent.words.size();
  for (uint32_t at = sent.common; at < end; at += sent.words[at] >> 8) {
    const uint32_t* word = &sent.words[at];
    const uint32_t op = word[0] & 0xFF, length = word[0] >> 8;
    const auto refuse = [&](int place, uint32_t value, const char* how) {
      tfmem::GpuSent damaged = sent;
      damaged.words[at + place] = value;
      if (!check(damaged).ok()) {
        ++refused[op];
        return;
      }
      ++failures;
      std::fprintf(stderr, "%s at word %u is not refused: %s\n", kNames[op], at, how);
    };
    refuse(0, op | (length + 1) << 8, "too long");
    refuse(0, op | (length - 1) << 8, "too short");
    refuse(0, 99 | length << 8, "no op");
    switch (static_cast<GpuOp>(op)) {
      case GpuOp::kMultiply:
        refuse(1, plain, "a product without tiles");
        refuse(3, tfmem::kTile + 1, "more rows than a tile's");
        refuse(4, word[4] + 1, "outputs amid a tile");
        refuse(4, (tiled[word[1]] + tfmem::kTile - 1) / tfmem::kTile * tfmem::kTile,
               "outputs behind the last");
        refuse(4, 0xFFFFFFC0u, "outputs far behind the last");
        [[fallthrough]];
      case GpuOp::kRun:
        refuse(1, segments, "no segment");
        refuse(1, 0xFFFFFFFFu, "no segment");
        refuse(2, nodes, "rows behind the last");
        refuse(2, 0xFFFFFFFFu, "a row before the first");
        refuse(3, nodes + 1, "more rows than there are");
        break;
      case GpuOp::kGradient:
        refuse(1, parameters, "no parameter");
        refuse(1, sparse, "a table");
        refuse(2, 1 << 20, "a tile below the last row");
        refuse(3, 1 << 20, "a tile behind the last column");
        break;
      case GpuOp::kSumRows:
        refuse(1, parameters, "no parameter");
        refuse(1, dense, "no table");
        refuse(2, looked_up[word[1]].rows(), "rows behind the last");
        refuse(3, looked_up[word[1]].rows() + 1, "more rows than there are");
        break;
      case GpuOp::kSignal:
        refuse(1, sent.phases, "no phase");
        if (static_cast<int>(word[1]) + 1 < sent.phases) refuse(1, word[1] + 1, "another phase");
        break;
      case GpuOp::kWait:
        refuse(1, sent.phases, "no phase");
        refuse(2, word[2] + 1, "more processors than signal");
        refuse(2, 0, "other");
        break;
      case GpuOp::kGather:
        refuse(1, 0, "no result");
        refuse(1, program.words, "behind the last pointer");
        refuse(3, end, "a list behind the end");
        refuse(4, nodes, "nodes behind the last");
        break;
      case GpuOp::kLosses:
        refuse(1, examples, "examples behind the last");
        refuse(2, examples + 1, "more examples than there are");
        break;
      case GpuOp::kCall:
        refuse(1, word[1] + 1, "amid an instruction");
        refuse(1, word[2], "nothing");
        refuse(1, 0, "before what is common");
        refuse(2, end, "behind what is common");
        break;
    }
  }
  for (size_t op = 1; op < std::size(kNames); ++op) std::printf("%s %d\n", kNames[op], refused[op]);
  return failures == 0 ? 0 : 1;
}
