#include "custom_ops/ops/cpu/sized_expression.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

using Kind = ExpressionNode::Kind;

constexpr int64_t kMostDrawn = int64_t{1} << 55;     // random numbers of one generator
constexpr int64_t kMostGathered = int64_t{1} << 55;  // that an index's terms give

template <typename... Parts>
absl::Status WrongSize(Parts... parts) {
  return absl::InvalidArgumentError(absl::StrCat("program: ", parts...));
}

absl::Status CheckSizes(const Expression& expression, const std::vector<int64_t>& axes,
                        const std::vector<Shape>& shapes) {
  if (axes.size() != expression.axes.size() || shapes.size() != expression.tensors.size()) {
    return WrongSize("has ", expression.axes.size(), " axes and ", expression.tensors.size(),
                     " inputs; found ", axes.size(), " and ", shapes.size());
  }
  for (size_t i = 0; i < axes.size(); ++i) {
    const int64_t size = expression.axes[i];
    if (size != 0 && size != axes[i]) {
      return WrongSize("axis ", i, " has ", size, " positions; found ", axes[i]);
    }
  }
  // All axes together may have more positions than there are numbers: nothing need vary along all.
  for (int64_t size : axes) {
    if (CountNumbers({size}) < 0)
      return WrongSize("an axis has a negative size, or too many positions");
  }
  for (size_t i = 0; i < shapes.size(); ++i) {
    if (static_cast<int>(shapes[i].size()) != expression.tensors[i].rank) {
      return WrongSize("tensor ", i, " has ", expression.tensors[i].rank, " dimensions; found ",
                       shapes[i].size());
    }
    if (CountNumbers(shapes[i]) < 0) return WrongSize("tensor ", i, " has too many numbers");
  }
  return absl::OkStatus();
}

std::vector<bool> LiveNodes(const Expression& expression) {
  std::vector<bool> live(expression.nodes.size(), false);
  for (const ExpressionOutput& output : expression.outputs) live[output.node] = true;
  for (int place = expression.nodes.size() - 1; place >= 0; --place) {
    if (!live[place]) continue;
    const ExpressionNode& node = expression.nodes[place];
    for (int argument : node.arguments) live[argument] = true;
    for (const Index& index : node.index) {
      for (int value : index.nodes) live[value] = true;
    }
  }
  return live;
}

class Sizing {
 public:
  Sizing(const Expression& expression, const std::vector<int64_t>& sizes,
         const std::vector<Shape>& shapes)
      : expression_(expression),
        sizes_(sizes),
        shapes_(shapes),
        live_(LiveNodes(expression)),
        at_(expression.nodes.size(), -1) {}

  absl::StatusOr<SizedExpression> Run() {
    SplitAxes();
    for (size_t place = 0; place < expression_.nodes.size(); ++place) {
      if (live_[place]) TFMEM_RETURN_IF_ERROR(AddNode(place));
    }
    for (const ExpressionOutput& output : expression_.outputs) {
      Shape shape;
      for (int axis : output.axes) shape.push_back(sizes_[axis]);
      if (CountNumbers(shape) < 0) return WrongSize("an output has too many numbers");
      const std::vector<int64_t> strides = DenseStrides(shape);
      SizedOutput& sized = result_.outputs.emplace_back();
      sized.node = at_[output.node];
      sized.axes = PartsOf(output.varies());
      sized.access = NewAccess();
      for (size_t i = 0; i < shape.size(); ++i) {
        AddTerm({1, output.axes[i]}, strides[i], &sized.access);
      }
    }
    return std::move(result_);
  }

 private:
  // A part of an axis: of its digits, if positions are written in a mixed radix.
  struct Part {
    int axis = 0;  // of the result
    int64_t step = 1;
  };

  // Where an index divides an axis. An axis whose cuts do not divide each other stays whole.
  void SplitAxes() {
    std::vector<std::vector<int64_t>> cuts(sizes_.size(), {1});
    std::vector<bool> whole(sizes_.size(), false);
    int parts = cuts.size();
    auto cut = [&](int axis, int64_t at) {
      if (at >= sizes_[axis]) return;
      std::vector<int64_t>& others = cuts[axis];
      if (std::find(others.begin(), others.end(), at) != others.end()) return;
      bool fits = sizes_[axis] % at == 0 && parts < kMostAxes;
      for (int64_t other : others) fits &= other % at == 0 || at % other == 0;
      if (!fits) whole[axis] = true;
      others.push_back(at);
      ++parts;
    };
    for (size_t place = 0; place < expression_.nodes.size(); ++place) {
      if (!live_[place]) continue;
      for (const Index& index : expression_.nodes[place].index) {
        for (const IndexTerm& term : index.terms) {
          if (term.axis < 0) continue;
          cut(term.axis, term.divisor);
          if (Wraps(term)) cut(term.axis, term.divisor * term.modulus);
        }
      }
    }
    parts_.resize(sizes_.size());
    for (size_t axis = 0; axis < sizes_.size(); ++axis) {
      if (sizes_[axis] == 1) continue;
      if (whole[axis]) cuts[axis] = {1};
      std::sort(cuts[axis].rbegin(), cuts[axis].rend());  // the fastest last
      int64_t end = sizes_[axis];
      for (int64_t step : cuts[axis]) {
        parts_[axis].push_back({static_cast<int>(result_.axes.size()), step});
        result_.axes.push_back(end / step);
        result_.origin.push_back(axis);
        result_.step.push_back(step);
        end = step;
      }
    }
  }

  // Whether a term's modulus makes a difference.
  bool Wraps(const IndexTerm& term) const {
    return term.modulus != 0 && term.modulus <= (sizes_[term.axis] - 1) / term.divisor;
  }

  // The parts of axes of the program.
  AxisSet PartsOf(AxisSet axes) const {
    AxisSet set;
    for (size_t axis = 0; axis < parts_.size(); ++axis) {
      if (!axes.Has(axis)) continue;
      for (const Part& part : parts_[axis]) set.Add(part.axis);
    }
    return set;
  }

  Access NewAccess() const {
    Access access;
    access.strides.assign(result_.axes.size(), 0);
    return access;
  }

  // The term's value times `stride`.
  void AddTerm(const IndexTerm& term, int64_t stride, Access* access) const {
    if (term.axis < 0) {
      access->base += term.factor * stride;
      return;
    }
    const int64_t size = sizes_[term.axis];
    if (size <= 1 || term.divisor >= size) return;
    const int64_t factor = term.factor * stride;
    const int64_t end = Wraps(term) ? term.divisor * term.modulus : size;
    const std::vector<Part>& parts = parts_[term.axis];
    if (parts.size() == 1 && (term.divisor > 1 || end < size)) {
      access->uneven.push_back(
          {factor, parts[0].axis, term.divisor, end < size ? term.modulus : 0});
      return;
    }
    for (const Part& part : parts) {
      if (part.step >= term.divisor && part.step < end) {
        access->strides[part.axis] += factor * (part.step / term.divisor);
      }
    }
  }

  absl::Status AddNode(int place) {
    const ExpressionNode& node = expression_.nodes[place];
    SizedNode sized;
    sized.kind = node.kind;
    sized.dtype = node.dtype;
    sized.tensor = node.tensor;
    sized.counter = node.counter;
    sized.value = node.value;
    sized.reduction = node.reduction;
    sized.op = node.op;
    for (int argument : node.arguments) {
      sized.arguments.push_back(at_[argument]);
      sized.varies |= result_.nodes[at_[argument]].varies;
    }
    if (node.kind == Kind::kReduce) {
      sized.axes = PartsOf(node.axes);
      sized.varies -= sized.axes;
      if (sized.axes.empty()) {  // of one position: TensorFlow passes it on, too
        at_[place] = sized.arguments[0];
        return absl::OkStatus();
      }
    } else if (node.kind == Kind::kPosition) {
      sized.access = NewAccess();
      AddTerm({1, node.axis}, 1, &sized.access);
      sized.varies = PartsOf(node.varies);
    } else if (node.kind == Kind::kRandom) {
      TFMEM_RETURN_IF_ERROR(AddRandom(node, &sized));
    } else if (node.kind == Kind::kInput) {
      TFMEM_RETURN_IF_ERROR(AddIndices(node, &sized));
    }
    if (!Countable(sized.varies | sized.axes))
      return WrongSize("node ", place, " has too many positions");
    at_[place] = result_.nodes.size();
    result_.nodes.push_back(std::move(sized));
    return absl::OkStatus();
  }

  bool Countable(AxisSet along) const {
    std::vector<int64_t> sizes;
    for (size_t axis = 0; axis < result_.axes.size(); ++axis) {
      if (along.Has(axis)) sizes.push_back(result_.axes[axis]);
    }
    return CountNumbers(sizes) >= 0;
  }

  absl::Status AddRandom(const ExpressionNode& node, SizedNode* sized) {
    const int64_t key = CountNumbers(shapes_[node.tensor]);
    const int64_t counter = CountNumbers(shapes_[node.counter]);
    if (node.tensor == node.counter) {
      if (key != 2) return WrongSize("a seed has ", key, " numbers; expected 2");
    } else if (key != 1 || counter != 2) {
      return WrongSize("a random generator has a key of ", key, " numbers and a counter of ",
                       counter, "; expected 1 and 2");
    }
    int64_t least = 0, most = 0;
    sized->access = NewAccess();
    for (const IndexTerm& term : node.index[0].terms) {
      const int64_t size = term.axis < 0 ? 1 : sizes_[term.axis];
      int64_t from = 0, to = 0;
      if (size > 0) term.Bounds(size, &from, &to);
      least += from;
      most += to;
      AddTerm(term, 1, &sized->access);
    }
    if (least < 0 || most >= kMostDrawn) {
      return WrongSize("random numbers ", least, " to ", most, " are drawn; expected 0 to ",
                       kMostDrawn - 1);
    }
    sized->varies = PartsOf(node.varies);
    return absl::OkStatus();
  }

  absl::Status AddIndices(const ExpressionNode& node, SizedNode* sized) {
    const Shape& shape = shapes_[node.tensor];
    const std::vector<int64_t> strides = DenseStrides(shape);
    sized->access = NewAccess();
    for (size_t i = 0; i < shape.size(); ++i) {
      const Index& index = node.index[i];
      int64_t least = 0, most = 0;
      bool empty = false;
      for (const IndexTerm& term : index.terms) {
        const int64_t size = term.axis < 0 ? 1 : sizes_[term.axis];
        int64_t from = 0, to = 0;
        if (size > 0) term.Bounds(size, &from, &to);
        empty |= size == 0;
        least += from;
        most += to;
      }
      // Nothing is read along an empty axis.
      const bool gathers = !index.nodes.empty();
      const int64_t end = gathers ? kMostGathered : shape[i];
      if (!empty && (least < (gathers ? -end : 0) || most >= end)) {
        return WrongSize("an index of tensor ", node.tensor, " goes from ", least, " to ", most,
                         " in dimension ", i, ", which has ", shape[i], " positions");
      }
      if (gathers) {
        Gather& gather = sized->gathers.emplace_back();
        gather.size = shape[i];
        gather.stride = strides[i];
        gather.position = NewAccess();
        for (int value : index.nodes) {
          gather.nodes.push_back(at_[value]);
          gather.axes |= expression_.nodes[value].varies;
          sized->varies |= result_.nodes[at_[value]].varies;
        }
      }
      for (const IndexTerm& term : index.terms) {
        if (empty) continue;
        if (gathers) {
          AddTerm(term, 1, &sized->gathers.back().position);
        } else {
          AddTerm(term, strides[i], &sized->access);
        }
      }
    }
    sized->varies |= sized->access.varies();
    for (const Gather& gather : sized->gathers) sized->varies |= gather.position.varies();
    // What is not read has no numbers all the same.
    const AxisSet axes = PartsOf(node.varies);
    for (size_t axis = 0; axis < result_.axes.size(); ++axis) {
      if (result_.axes[axis] == 0 && axes.Has(axis)) sized->varies.Add(axis);
    }
    return absl::OkStatus();
  }

  const Expression& expression_;
  const std::vector<int64_t>& sizes_;
  const std::vector<Shape>& shapes_;
  const std::vector<bool> live_;
  std::vector<std::vector<Part>> parts_;  // of each axis of the program
  std::vector<int> at_;                   // of each node of the program the result's
  SizedExpression result_;
};

}  // namespace

AxisSet Access::varies() const {
  AxisSet varies;
  for (size_t axis = 0; axis < strides.size(); ++axis) {
    if (strides[axis] != 0) varies.Add(axis);
  }
  for (const IndexTerm& term : uneven) varies.Add(term.axis);
  return varies;
}

int64_t SizedExpression::Positions(AxisSet along) const {
  int64_t positions = 1;
  for (size_t axis = 0; axis < axes.size(); ++axis) {
    if (along.Has(axis)) positions *= axes[axis];
  }
  return positions;
}

int64_t CountNumbers(const std::vector<int64_t>& sizes) {
  __int128 numbers = 1;
  bool none = false;
  for (int64_t size : sizes) {
    if (size < 0) return -1;
    none |= size == 0;
    numbers = std::min<__int128>(numbers * std::max<int64_t>(size, 1), kMostNumbers + 1);
  }
  if (numbers > kMostNumbers) return -1;
  return none ? 0 : static_cast<int64_t>(numbers);
}

std::vector<int64_t> DenseStrides(const Shape& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (int i = static_cast<int>(shape.size()) - 2; i >= 0; --i) {
    strides[i] = strides[i + 1] * shape[i + 1];
  }
  return strides;
}

absl::StatusOr<SizedExpression> SizeExpression(const Expression& expression,
                                               const std::vector<int64_t>& axes,
                                               const std::vector<Shape>& shapes) {
  TFMEM_RETURN_IF_ERROR(CheckSizes(expression, axes, shapes));
  return Sizing(expression, axes, shapes).Run();
}

absl::StatusOr<std::vector<int64_t>> AxisSizes(const Expression& expression,
                                               const std::vector<Shape>& shapes) {
  if (shapes.size() != expression.tensors.size()) {
    return WrongSize("has ", expression.tensors.size(), " inputs; found ", shapes.size());
  }
  std::vector<int64_t> axes;
  for (int64_t size : expression.axes) axes.push_back(size == 0 ? -1 : size);
  for (const ExpressionNode& node : expression.nodes) {
    if (node.kind != Kind::kInput) continue;
    const Shape& shape = shapes[node.tensor];
    if (shape.size() != node.index.size()) {
      return WrongSize("tensor ", node.tensor, " has ", node.index.size(), " dimensions; found ",
                       shape.size());
    }
    for (size_t i = 0; i < shape.size(); ++i) {
      const int axis = node.index[i].axis();
      if (axis < 0 || expression.axes[axis] != 0) continue;
      if (axes[axis] >= 0 && axes[axis] != shape[i]) {
        return WrongSize("axis ", axis, " has ", axes[axis], " positions, and ", shape[i],
                         " in tensor ", node.tensor);
      }
      axes[axis] = shape[i];
    }
  }
  for (size_t i = 0; i < axes.size(); ++i) {
    if (axes[i] < 0) return WrongSize("nothing says how many positions axis ", i, " has");
  }
  return axes;
}

}  // namespace tfmem
