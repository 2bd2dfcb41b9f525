// A set of axes of a program, which knows how many axes it has room for.
#pragma once

#include <bitset>

namespace tfmem {

inline constexpr int kMostAxes = 64;  // MOST_AXES of custom_ops/expr/program.py

// Axes are 0 to kMostAxes - 1, which the code that reads and sizes programs ensures. Adding another
// one throws std::out_of_range: it never becomes an axis that is there.
class AxisSet {
 public:
  AxisSet() = default;
  template <typename Axes>
  static AxisSet Of(const Axes& axes) {
    AxisSet set;
    for (int axis : axes) set.Add(axis);
    return set;
  }

  void Add(int axis) { axes_.set(axis); }
  bool Has(int axis) const { return axes_.test(axis); }
  bool empty() const { return axes_.none(); }
  bool Covers(AxisSet other) const { return (other - *this).empty(); }

  AxisSet& operator|=(AxisSet other) { return axes_ |= other.axes_, *this; }
  AxisSet& operator-=(AxisSet other) { return axes_ &= ~other.axes_, *this; }
  friend AxisSet operator|(AxisSet a, AxisSet b) { return a |= b; }
  friend AxisSet operator-(AxisSet a, AxisSet b) { return a -= b; }
  friend AxisSet operator&(AxisSet a, AxisSet b) { return a - (a - b); }
  friend bool operator==(AxisSet a, AxisSet b) { return a.axes_ == b.axes_; }
  friend bool operator!=(AxisSet a, AxisSet b) { return a.axes_ != b.axes_; }
  // Some order, for maps.
  friend bool operator<(AxisSet a, AxisSet b) { return a.axes_.to_ullong() < b.axes_.to_ullong(); }

 private:
  std::bitset<kMostAxes> axes_;
};

}  // namespace tfmem
