// Where everything lies that a call of TfmemRecurrent on the CPU keeps while it runs.
#pragma once

#include <cstdint>

#include "custom_ops/ops/recurrent/recurrent_cut.h"
#include "custom_ops/ops/recurrent/step_program.h"
#include "custom_ops/ops/sizes.h"

namespace tfmem {

// One block of memory, aligned to a cache line, cut into arrays of numbers of type Real.
template <typename Real>
class RecurrentWorkspace {
 public:
  RecurrentWorkspace(const RecurrentCut& cut, const StepProgram& program, int64_t states)
      : cut_(cut), program_(program), state_count_(states) {
    const Size directions = cut.directions;
    const Size shares = cut.shares();
    const Size blocks = static_cast<int64_t>(program.blocks.size());
    panels_ = Reserve(directions * blocks * cut.units * cut.stride());
    states_ = Reserve(directions * 2 * states * cut.buffer());
    carried_ = Reserve(directions * program.carried * cut.buffer());
    carried_scalars_ = Reserve(shares * program.carried_scalars * cut.batch);
    row_sums_ = Reserve(directions * program.row_sums() * cut.batch * cut.tiles);
    products_ = Reserve(shares * program.products_at_once * cut.group());
    wide_tiles_ = Reserve(shares * program.tile.wide_locations * cut.tile());
    scalar_tiles_ = Reserve(shares * program.tile.scalar_locations * cut.scalars());
  }

  // -1 if 64 bits do not count them.
  int64_t bytes() const { return (size_ * static_cast<int64_t>(sizeof(Real))).value(); }
  void Set(void* memory) { memory_ = static_cast<Real*>(memory); }

  // A panel of a block of weights, [units, panel].
  Real* Panel(int direction, int64_t tile, int64_t block) const {
    const int64_t blocks = program_.blocks.size();
    const int64_t number = (direction * cut_.tiles + tile) * blocks + block;
    return memory_ + panels_ + number * cut_.units * cut_.panel;
  }
  // [batch, stride]. A step reads its states from one place and writes the next ones to another,
  // which the step after it reads.
  Real* State(int direction, int64_t step, int state) const {
    const int64_t number = (direction * 2 + step % 2) * state_count_ + state;
    return memory_ + states_ + number * cut_.buffer();
  }
  // What passes between stages, [batch, stride].
  Real* Carried(int direction, int index) const {
    const int64_t number = direction * program_.carried + index;
    return memory_ + carried_ + number * cut_.buffer();
  }
  // A carried scalar, [batch]; each share has its own.
  Real* CarriedScalar(int share, int index) const {
    const int64_t number = share * program_.carried_scalars + index;
    return memory_ + carried_scalars_ + number * cut_.batch;
  }
  // The parts of a row sum, [batch, tiles].
  Real* RowSum(int direction, int index) const {
    const int64_t number = direction * program_.row_sums() + index;
    return memory_ + row_sums_ + number * cut_.batch * cut_.tiles;
  }
  // A product of a group, [group rows, group width].
  Real* Product(int share, int product) const {
    const int64_t number = share * program_.products_at_once + product;
    return memory_ + products_ + number * cut_.group();
  }
  // A value of a tile, [tile rows, group width] or [tile rows].
  Real* WideTile(int share, int location) const {
    const int64_t number = share * program_.tile.wide_locations + location;
    return memory_ + wide_tiles_ + number * cut_.tile();
  }
  Real* ScalarTile(int share, int location) const {
    const int64_t number = share * program_.tile.scalar_locations + location;
    return memory_ + scalar_tiles_ + number * cut_.scalars();
  }

 private:
  // Whole cache lines.
  int64_t Reserve(Size numbers) {
    const int64_t place = size_.value();
    const Size lines = numbers + 63;
    size_ = lines.ok() ? size_ + lines.value() / 64 * 64 : Size(-1);
    return place;
  }

  const RecurrentCut& cut_;
  const StepProgram& program_;
  const int64_t state_count_;
  Real* memory_ = nullptr;
  Size size_ = 0;
  int64_t panels_ = 0;
  int64_t states_ = 0;
  int64_t carried_ = 0;
  int64_t carried_scalars_ = 0;
  int64_t row_sums_ = 0;
  int64_t products_ = 0;
  int64_t wide_tiles_ = 0;
  int64_t scalar_tiles_ = 0;
};

}  // namespace tfmem
