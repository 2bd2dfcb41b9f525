// Graphs as integers: what a batch is made of.

#pragma once

#include <cstdint>
#include <vector>

#include "custom_ops/extension/python.h"

namespace tfmem {

// One of the three columns of a batch: a row for each example.
struct Column {
  std::vector<int32_t> values;
  std::vector<int64_t> splits = {0};

  // Python's integers, of a tuple. False with an error set.
  bool Add(PyObject* integers);
  bool AddOne(PyObject* integer);
  void EndRow() { splits.push_back(static_cast<int64_t>(values.size())); }
};

struct Columns {
  Column kinds, children, arguments;

  void EndRow() {
    for (Column* column : {&kinds, &children, &arguments}) column->EndRow();
  }
  // The values and the row splits of each column, as bytes.
  PyObject* ToBytes() const;
};

}  // namespace tfmem
