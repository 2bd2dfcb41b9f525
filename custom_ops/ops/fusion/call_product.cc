#include "custom_ops/ops/fusion/call_product.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "custom_ops/ops/cpu/product.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/types.h"

namespace tfmem {
namespace {

using ::tensorflow::TensorShape;

constexpr int64_t kMostMatrices = 1 << 16;  // of a batch, each of which is written down

template <typename Real>
class ProductOfReals : public CallProduct {
 public:
  ProductOfReals(ProductSizes sizes, std::optional<Elementwise> activation,
                 const CpuKernels<Real>& kernels)
      : product_(std::move(sizes), activation, kernels) {}

  int64_t WorkspaceBytes(int threads) const override { return product_.WorkspaceBytes(threads); }
  void Run(const void* a, const void* b, const void* bias, void* c, const TileThreads& threads,
           void* workspace) const override {
    product_.Run(static_cast<const Real*>(a), static_cast<const Real*>(b),
                 static_cast<const Real*>(bias), static_cast<Real*>(c), threads, workspace);
  }

 private:
  const Product<Real> product_;
};

template <typename Real>
std::unique_ptr<const CallProduct> Make(ProductSizes sizes, std::optional<Elementwise> activation,
                                        const CpuKernels<Real>& kernels) {
  if (!IsFast(sizes, kernels)) return nullptr;
  return std::make_unique<ProductOfReals<Real>>(std::move(sizes), activation, kernels);
}

// What `_FusedMatMul` does to a product, if these loops do it, too: adds a bias, and then an
// activation, if any.
bool ReadFused(const tensorflow::AttrSlice& attrs, std::optional<Elementwise>* activation) {
  std::vector<std::string> fused;
  if (!GetNodeAttr(attrs, "fused_ops", &fused).ok() || fused.empty() || fused.size() > 2 ||
      fused[0] != "BiasAdd") {
    return false;
  }
  if (fused.size() == 1) return true;
  if (fused[1] == "Relu") *activation = Elementwise::kRelu;
  if (fused[1] == "Relu6") *activation = Elementwise::kRelu6;
  return activation->has_value();
}

// Which matrices of a and b each of c's is the product of, broadcast as NumPy does.
bool Pair(const TensorShape& a, const TensorShape& b, const TensorShape& c,
          std::vector<ProductSizes::Factors>* batch) {
  int64_t a_step = 1, b_step = 1;
  batch->assign(1, {});
  for (int back = 3; back <= c.dims(); ++back) {
    const auto size_of = [&](const TensorShape& shape) {
      return back > shape.dims() ? 1 : shape.dim_size(shape.dims() - back);
    };
    const int64_t size = size_of(c), a_size = size_of(a), b_size = size_of(b);
    if ((a_size != size && a_size != 1) || (b_size != size && b_size != 1)) return false;
    const int64_t inner = batch->size();
    if (size * inner > kMostMatrices) return false;
    std::vector<ProductSizes::Factors> outer;
    for (int64_t i = 0; i < size; ++i) {
      for (const ProductSizes::Factors& factors : *batch) {
        outer.push_back({factors.a + (a_size == 1 ? 0 : i * a_step),
                         factors.b + (b_size == 1 ? 0 : i * b_step)});
      }
    }
    *batch = std::move(outer);
    a_step *= a_size;
    b_step *= b_size;
  }
  return true;
}

}  // namespace

std::unique_ptr<const CallProduct> ProductOf(const tensorflow::NodeDef& node,
                                             const std::vector<TensorShape>& inputs,
                                             const TensorShape& c, const InstructionSet& kernels) {
  const bool fused = node.op() == "_FusedMatMul", single = fused || node.op() == "MatMul";
  const bool batched = node.op() == "BatchMatMul" || node.op() == "BatchMatMulV2";
  ProductSizes sizes;
  tensorflow::DataType dtype = tensorflow::DT_INVALID;
  const tensorflow::AttrSlice attrs(node);
  if ((!single && !batched) || inputs.size() != (fused ? 3 : 2) ||
      !GetNodeAttr(attrs, "T", &dtype).ok() ||
      !GetNodeAttr(attrs, single ? "transpose_a" : "adj_x", &sizes.a_transposed).ok() ||
      !GetNodeAttr(attrs, single ? "transpose_b" : "adj_y", &sizes.b_transposed).ok()) {
    return nullptr;
  }
  std::optional<Elementwise> activation;
  if (fused && !ReadFused(attrs, &activation)) return nullptr;
  const TensorShape &a = inputs[0], &b = inputs[1];
  if (a.dims() < 2 || b.dims() < 2 || c.dims() != std::max(a.dims(), b.dims())) return nullptr;
  if (single && c.dims() != 2) return nullptr;
  const auto rows_of = [](const TensorShape& shape) { return shape.dim_size(shape.dims() - 2); };
  const auto columns_of = [](const TensorShape& shape) { return shape.dim_size(shape.dims() - 1); };
  sizes.rows = sizes.a_transposed ? columns_of(a) : rows_of(a);
  sizes.depth = sizes.a_transposed ? rows_of(a) : columns_of(a);
  sizes.columns = sizes.b_transposed ? rows_of(b) : columns_of(b);
  const int64_t depth = sizes.b_transposed ? columns_of(b) : rows_of(b);
  if (depth != sizes.depth || rows_of(c) != sizes.rows || columns_of(c) != sizes.columns ||
      !Pair(a, b, c, &sizes.batch)) {
    return nullptr;
  }
  if (fused && inputs[2] != TensorShape({sizes.columns})) return nullptr;
  if (dtype == tensorflow::DT_FLOAT) {
    return Make(std::move(sizes), activation, kernels.single_precision);
  }
  if (dtype == tensorflow::DT_DOUBLE) {
    return Make(std::move(sizes), activation, kernels.double_precision);
  }
  return nullptr;
}

}  // namespace tfmem
