// A region's call of a matrix product on the CPU, where loops of our own are as fast as
// TensorFlow's kernel.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "custom_ops/ops/cpu/cpu_kernels.h"
#include "custom_ops/ops/cpu/tile_run.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace tfmem {

class CallProduct {
 public:
  virtual ~CallProduct() = default;
  virtual double work_ns() const = 0;
  virtual int64_t WorkspaceBytes(int threads) const = 0;
  // `bias` may be null.
  virtual void Run(const void* a, const void* b, const void* bias, void* c,
                   const TileThreads& threads, void* workspace) const = 0;
};

// The product that a call of `node` computes, with inputs and an output of these shapes. Null if it
// is no product, alone or with a bias and an activation that these loops have; if its tensors do
// not fit each other; or if TensorFlow's kernel is better.
std::unique_ptr<const CallProduct> ProductOf(const tensorflow::NodeDef& node,
                                             const std::vector<tensorflow::TensorShape>& inputs,
                                             const tensorflow::TensorShape& output,
                                             const InstructionSet& kernels);

}  // namespace tfmem
