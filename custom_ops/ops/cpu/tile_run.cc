#include "custom_ops/ops/cpu/tile_run.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "custom_ops/ops/cpu/tile_plan.h"
#include "custom_ops/ops/cpu/tile_worker.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

constexpr double kThreadNs = 2e4;  // of work that are worth another thread

// Where in a domain a row and a column are, along each axis.
std::vector<int64_t> PositionsAt(const ExpressionTiles& tiles, const IndexFailure& failure) {
  std::vector<int64_t> positions(tiles.axes.size(), 0);
  const auto find = [&](const std::vector<int>& along, int64_t position) {
    for (auto axis = along.rbegin(); axis != along.rend(); ++axis) {
      positions[*axis] = position % tiles.axes[*axis];
      position /= tiles.axes[*axis];
    }
  };
  find(tiles.domains[failure.domain].rows, failure.row);
  find(tiles.domains[failure.domain].columns, failure.column);
  return positions;
}

// The last instruction that reads what one of them loads.
int LastUse(const std::vector<TileInstruction>& code, int load) {
  const TileInstruction& from = code[load];
  int last = load;
  for (int i = load + 1; i < static_cast<int>(code.size()); ++i) {
    const bool reduces = code[i].kind == TileInstruction::Kind::kReduce;
    const bool broadcasts = code[i].kind == TileInstruction::Kind::kBroadcast ||
                            code[i].kind == TileInstruction::Kind::kGatherRows;
    const bool scalar = reduces ? false : broadcasts ? true : code[i].type.scalar;
    for (int argument : code[i].arguments) {
      if (argument == from.target && scalar == from.type.scalar) last = i;
    }
    if (code[i].target == from.target && code[i].type.scalar == from.type.scalar) break;
  }
  return last;
}

}  // namespace

PreparedExpression::PreparedExpression() = default;
PreparedExpression::~PreparedExpression() = default;

absl::StatusOr<std::unique_ptr<const PreparedExpression>> PreparedExpression::Prepare(
    const Expression& expression, const std::vector<int64_t>& axes,
    const std::vector<Shape>& shapes, const InstructionSet& kernels) {
  TFMEM_ASSIGN_OR_RETURN(const SizedExpression sized, SizeExpression(expression, axes, shapes));
  TFMEM_ASSIGN_OR_RETURN(ExpressionTiles tiles, CompileExpression(sized, shapes.size()));
  std::unique_ptr<PreparedExpression> prepared(new PreparedExpression);
  prepared->plan_ = std::make_unique<const TilePlan>(std::move(tiles), kernels);
  for (size_t i = 0; i < shapes.size(); ++i) {
    prepared->input_bytes_.push_back(CountNumbers(shapes[i]) *
                                     TensorBytes(expression.tensors[i].dtype));
  }
  for (const ExpressionOutput& output : expression.outputs) {
    Shape& shape = prepared->output_shapes_.emplace_back();
    for (int axis : output.axes) shape.push_back(axes[axis]);
    prepared->output_bytes_.push_back(CountNumbers(shape) *
                                      TensorBytes(expression.nodes[output.node].dtype));
  }
  prepared->origin_ = sized.origin;
  prepared->step_ = sized.step;
  return prepared;
}

double PreparedExpression::work_ns() const { return plan_->work; }

int PreparedExpression::UsefulThreads(int threads) const {
  int64_t most = 1;
  for (const LevelPlan& level : plan_->levels) most = std::max(most, level.pieces);
  const double useful = std::min<double>(plan_->work / kThreadNs, most);
  return std::clamp<int>(useful, 1, std::max(threads, 1));
}

int64_t PreparedExpression::WorkspaceBytes(int threads) const {
  return plan_->shared_bytes + UsefulThreads(threads) * plan_->thread_bytes;
}

bool PreparedExpression::MayShare(int input, int output) const {
  const int outputs = input_bytes_.size();
  if (input_bytes_[input] != output_bytes_[output]) return false;
  const ExpressionTiles& tiles = plan_->tiles;
  // Where the output is first written, and through which port.
  int level = -1, stage = -1, place = -1, port = -1;
  for (size_t i = 0; i < tiles.program.stages.size(); ++i) {
    const std::vector<TileInstruction>& code = tiles.program.stages[i].code;
    for (size_t j = 0; j < code.size(); ++j) {
      if (code[j].kind != TileInstruction::Kind::kStore) continue;
      if (tiles.stores[code[j].index].tensor != outputs + output) continue;
      level = tiles.levels[i], stage = i, port = code[j].index;
      place = j > 0 && plan_->stages[i].direct[j - 1] >= 0 ? j - 1 : j;
    }
  }
  const TensorPort& store = plan_->stores[port];
  for (size_t i = 0; i < tiles.program.stages.size(); ++i) {
    if (tiles.levels[i] < level) continue;
    const std::vector<TileInstruction>& code = tiles.program.stages[i].code;
    for (size_t j = 0; j < code.size(); ++j) {
      const TileInstruction& instruction = code[j];
      if (instruction.kind == TileInstruction::Kind::kCheck) return false;
      const bool gathers = instruction.kind == TileInstruction::Kind::kGather ||
                           instruction.kind == TileInstruction::Kind::kGatherRows;
      if (!gathers && instruction.kind != TileInstruction::Kind::kLoad) continue;
      if (tiles.loads[instruction.index].counter == input) return false;
      if (tiles.loads[instruction.index].tensor != input) continue;
      if (tiles.loads[instruction.index].counter >= 0) return false;
      const bool at_once = static_cast<int>(i) == stage && !gathers && !instruction.same_rows &&
                           instruction.type == code[place].type &&
                           plan_->loads[instruction.index].SameAs(store);
      if (!at_once || LastUse(code, j) > place) return false;
    }
  }
  return true;
}

const TileProgram& PreparedExpression::program() const { return plan_->tiles.program; }

absl::Status PreparedExpression::Run(absl::Span<const void* const> inputs,
                                     absl::Span<void* const> outputs, const TileThreads& threads,
                                     void* workspace) const {
  if (inputs.size() != input_bytes_.size() || outputs.size() != output_bytes_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("program: has ", input_bytes_.size(), " inputs and ", output_bytes_.size(),
                     " outputs; found ", inputs.size(), " and ", outputs.size()));
  }
  const TilePlan& plan = *plan_;
  std::unique_ptr<void, decltype(&std::free)> own(nullptr, std::free);
  if (workspace == nullptr) {
    const int64_t bytes = WorkspaceBytes(threads.count);
    own.reset(bytes < kMostWorkspace ? std::aligned_alloc(64, bytes + 64) : nullptr);
    if (own == nullptr) {
      return absl::ResourceExhaustedError(absl::StrCat("program: no memory for ", bytes, " bytes"));
    }
    workspace = own.get();
  }
  RunMemory memory;
  memory.inputs = inputs.data();
  memory.outputs = outputs.data();
  memory.input_count = inputs.size();
  memory.output_count = outputs.size();
  memory.shared = static_cast<char*>(workspace);
  memory.threads = memory.shared + plan.shared_bytes;

  const int count = UsefulThreads(threads.count);
  const int shares = count == 1 ? 1 : 4 * count;
  // Each level's pieces, and then what is to be done with its reductions.
  const auto work = [&](int64_t phase, int share, int thread) {
    const LevelPlan& level = plan.levels[phase / 2];
    if (plan.tiles.levels[level.first_stage] > memory.failed_level) return;
    if (phase % 2 == 0) {
      int64_t first = level.pieces * share / shares;
      int64_t end = level.pieces * (share + 1) / shares;
      for (int stage = level.first_stage; stage < level.end_stage && first < end; ++stage) {
        const int64_t pieces = plan.stages[stage].pieces();
        if (first < pieces) {
          TileWorker(plan, &memory, stage, thread).RunPieces(first, std::min(end, pieces));
        }
        first = std::max<int64_t>(first - pieces, 0);
        end -= pieces;
      }
      return;
    }
    const int64_t tasks = level.finish.size();
    for (int64_t i = tasks * share / shares; i < tasks * (share + 1) / shares; ++i) {
      FinishReduction(plan, level.finish[i], memory.shared);
    }
  };
  RunPhases(2 * plan.levels.size(), shares, count, threads.schedule, ThreadWork(work));
  if (memory.failure.check < 0) return absl::OkStatus();

  return OutOfBounds(memory.failure);
}

// As TensorFlow says it of a gather on the CPU.
absl::Status PreparedExpression::OutOfBounds(const IndexFailure& failure) const {
  const IndexCheck& check = plan_->tiles.checks[failure.check];
  const std::vector<int64_t> positions = PositionsAt(plan_->tiles, failure);
  std::vector<int64_t> index;
  for (int axis = 0; axis < kMostAxes; ++axis) {
    if (!check.axes.Has(axis)) continue;
    index.push_back(0);
    for (size_t part = 0; part < positions.size(); ++part) {
      if (origin_[part] == axis) index.back() += positions[part] * step_[part];
    }
  }
  const std::string place =
      index.empty() ? "indices" : absl::StrCat("indices[", absl::StrJoin(index, ","), "]");
  return absl::InvalidArgumentError(
      absl::StrCat(place, " = ", failure.value, " is not in [0, ", check.size, ")"));
}

}  // namespace tfmem
