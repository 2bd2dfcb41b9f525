// A batch of graphs, decoded: every node has a level, one more than the highest of its children,
// and is a row among the nodes of its kind and among the states of its type.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "custom_ops/ops/dynamic/spec.h"

namespace tfmem {

// What travels: for each example the kinds of its nodes, the children of all of them one after the
// other, as positions in the example, and their integer arguments. `splits` say where an example
// begins. How many children and arguments a node has is what its kind says.
struct RaggedIntegers {
  absl::Span<const int32_t> values;
  absl::Span<const int64_t> splits;
};

// Nodes of one kind on one level: rows of the kind and of its type that follow each other.
struct NodeGroup {
  int level = 0;
  int kind = 0;
  int64_t first = 0;  // row of the kind
  int64_t count = 0;
  int64_t state = 0;  // row of the type
};

struct KindRows {
  int64_t count = 0;
  std::vector<int32_t> nodes;                   // of the batch
  std::vector<int32_t> examples;                // of each row
  std::vector<int32_t> states;                  // row of the type
  std::vector<std::vector<int32_t>> children;   // for each slot rows of the child's type
  std::vector<std::vector<int32_t>> arguments;  // for each argument
};

// A node's adjoint is the sum of what its parents put, in the order of the batch.
struct ParentEntry {
  int32_t kind = 0;
  int32_t slot = 0;
  int32_t row = 0;
};

struct TypeRows {
  int64_t count = 0;
  std::vector<int32_t> first_parent;  // of each row, and behind the last
  std::vector<ParentEntry> parents;
};

struct DynamicBatch {
  int64_t examples = 0;
  int64_t nodes = 0;
  int levels = 0;
  std::vector<NodeGroup> groups;  // by level, then kind
  std::vector<KindRows> kinds;
  std::vector<TypeRows> types;
  std::vector<int32_t> kind_of;   // of each node
  std::vector<int32_t> row_of;    // of the node's kind
  std::vector<int64_t> first_of;  // node of each example, and behind the last
};

// InvalidArgument names the example and the node, what was found and what was expected.
absl::StatusOr<DynamicBatch> DecodeBatch(const DynamicSpec& spec, const RaggedIntegers& kinds,
                                         const RaggedIntegers& children,
                                         const RaggedIntegers& arguments);

}  // namespace tfmem
