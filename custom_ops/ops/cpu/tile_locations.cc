#include "custom_ops/ops/cpu/tile_locations.h"

#include <algorithm>

namespace tfmem {
namespace {

// Gives values that do not live at the same time the same location.
class Locations {
 public:
  explicit Locations(int first) : next_(first) {}

  int Take() {
    if (idle_.empty()) return next_++;
    const int location = idle_.back();
    idle_.pop_back();
    return location;
  }
  void GiveBack(int location) { idle_.push_back(location); }
  int end() const { return next_; }

 private:
  int next_;
  std::vector<int> idle_;
};

// The locations of one stage: wide ones, scalar ones, and views, which begin after the wide ones of
// all stages and are counted from -2 down until that is known.
class LocationAssignment {
 public:
  LocationAssignment(const std::vector<TileConstant>& constants, const ConstantNumbers& constant_of)
      : constants_(constants), constant_of_(constant_of) {
    int scalars = 0;
    for (const TileConstant& constant : constants) scalars += constant.type.scalar;
    wide_ = Locations(constants.size() - scalars);
    scalar_ = Locations(scalars);
  }

  // Rewrites the code from values to locations.
  void Run(const std::vector<TileValue>& values, TileStage* stage) {
    values_ = &values;
    location_.assign(values_->size(), -1);
    std::vector<int> last_use(values_->size(), -1);
    std::vector<TileInstruction>& code = stage->code;
    for (size_t i = 0; i < code.size(); ++i) {
      for (int argument : code[i].arguments) {
        if (argument >= 0) last_use[argument] = i;
      }
    }
    for (size_t value = 0; value < values_->size(); ++value) {
      const TileValue& kind = (*values_)[value];
      if (kind.constant >= 0) {
        location_[value] = constants_[constant_of_.at({kind.constant, kind.type.scalar})].location;
      } else if (kind.own) {
        location_[value] = Take(kind);
      }
    }
    for (size_t i = 0; i < code.size(); ++i) {
      std::vector<int> dying;
      for (int& argument : code[i].arguments) {
        if (argument < 0) continue;
        const bool dies = last_use[argument] == static_cast<int>(i);
        if (dies && (*values_)[argument].constant < 0 && !(*values_)[argument].own) {
          last_use[argument] = -1;
          dying.push_back(argument);
        }
        argument = location_[argument];
      }
      // A target may take the place of an argument whose numbers are as long: number i is written
      // after it was read.
      const int target = code[i].target;
      std::vector<int> after;
      for (int value : dying) {
        const bool as_long = target < 0 || TileBytes((*values_)[value].type.dtype) ==
                                               TileBytes((*values_)[target].type.dtype);
        as_long ? GiveBack(value) : after.push_back(value);
      }
      if (target >= 0) {
        if (location_[target] == -1) location_[target] = Take((*values_)[target]);
        code[i].target = location_[target];
      }
      for (int value : after) GiveBack(value);
    }
  }

  int wide() const { return wide_.end(); }
  int scalar() const { return scalar_.end(); }
  int views() const { return views_.end(); }

 private:
  int Take(const TileValue& value) {
    if (value.view) return -2 - views_.Take();
    return (value.type.scalar ? scalar_ : wide_).Take();
  }

  void GiveBack(int value) {
    const TileValue& kind = (*values_)[value];
    if (kind.view) return views_.GiveBack(-2 - location_[value]);
    (kind.type.scalar ? scalar_ : wide_).GiveBack(location_[value]);
  }

  const std::vector<TileConstant>& constants_;
  const ConstantNumbers& constant_of_;
  const std::vector<TileValue>* values_ = nullptr;
  std::vector<int> location_;
  Locations wide_{0};
  Locations scalar_{0};
  Locations views_{0};
};

}  // namespace

ConstantNumbers PlaceConstants(const TileExpression& expression,
                               const std::vector<const std::vector<TileValue>*>& stages,
                               std::vector<TileConstant>* constants) {
  ConstantNumbers constant_of;
  int locations[2] = {0, 0};
  for (const std::vector<TileValue>* values : stages) {
    for (const TileValue& value : *values) {
      if (value.constant < 0) continue;
      const bool scalar = value.type.scalar;
      const int number = constants->size();
      if (!constant_of.try_emplace({value.constant, scalar}, number).second) continue;
      constants->push_back(
          {expression.nodes[value.constant].value, value.type, locations[scalar]++});
    }
  }
  return constant_of;
}

void AssignLocations(const std::vector<TileValue>& values, const ConstantNumbers& constant_of,
                     TileStage* stage, TileProgram* program) {
  LocationAssignment locations(program->constants, constant_of);
  locations.Run(values, stage);
  program->wide_locations = std::max(program->wide_locations, locations.wide());
  program->scalar_locations = std::max(program->scalar_locations, locations.scalar());
  program->views = std::max(program->views, locations.views());
}

}  // namespace tfmem
