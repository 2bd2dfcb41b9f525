// The op that TensorFlow's executor runs in place of one that a graph has.
#pragma once

#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/types.h"

namespace tfmem {

// Before a graph runs on a CPU, TensorFlow's own passes replace ops by others that are faster: a
// MatMul by oneDNN's. This is what they make of `node`, which is valid and has inputs of the types
// `inputs`; `node` itself if they fail. It may have other inputs and outputs.
tensorflow::NodeDef ExecutedOnCpu(const tensorflow::NodeDef& node,
                                  const tensorflow::DataTypeVector& inputs, int graph_def_version);

}  // namespace tfmem
