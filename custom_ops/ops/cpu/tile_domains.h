// The domains that a program's values are computed over: which of their axes are rows and which are
// columns.
#pragma once

#include <map>
#include <vector>

#include "custom_ops/ops/cpu/sized_expression.h"

namespace tfmem {

// Positions along some axes. Tiles cut it into blocks of [rows, columns].
struct TileDomain {
  std::vector<int> rows;  // axes, the last one the fastest
  std::vector<int> columns;
  // So many of the first rows' axes are kept by the reductions over tiles that reduce some rows'
  // axes and not others. All reductions of a domain that do so keep the same.
  int kept = 0;

  AxisSet row_set() const;
  AxisSet column_set() const;
};

// How a reduction is computed.
struct ReductionPlace {
  int domain = 0;
  bool in_tile = false;  // over whole rows of a tile, else over tiles
};

// Columns are the axes along which most of the tensors of a domain lie as they are in memory. A
// reduction over exactly these is within tiles, if a row is not too long. Each other one is over
// tiles, each of which gives its part; two that keep different axes of the rows are in separate
// domains, which differ in the order of rows.
class TileDomains {
 public:
  explicit TileDomains(const SizedExpression& expression);

  const TileDomain& operator[](int domain) const { return domains_[domain]; }
  int size() const { return domains_.size(); }

  // The domain of values that vary along these axes.
  int Of(AxisSet axes);
  // Where a node that reduces does so.
  const ReductionPlace& Reduction(int node) const { return reductions_.at(node); }

 private:
  const SizedExpression& expression_;
  std::vector<TileDomain> domains_;
  std::map<AxisSet, int> domain_of_;
  std::map<int, ReductionPlace> reductions_;
};

}  // namespace tfmem
