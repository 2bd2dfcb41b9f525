// cuBLASLt without a GPU: plain loops, enqueued on streams of the fake driver. Float32 and float64,
// in column-major order.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include "fake_cuda.h"

namespace {

constexpr int kInvalid = 7;
constexpr int kUnsupported = 15;
constexpr int kR32F = 0, kR64F = 1;
constexpr size_t kWorkspace = 1000;

struct Product {
  int compute = 0;
  int32_t transpose[2] = {0, 0};
  uint32_t epilogue = 1;
  const void* bias = nullptr;
};
struct Layout {
  int type = 0;
  int64_t rows = 0, columns = 0, leading = 0;
  int32_t batch = 1;
  int64_t offset = 0;
};
struct Heuristic {
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};

std::atomic<int> live{0};

template <typename T>
void Multiply(const Product& product, const T* a, const Layout& la, const T* b, const Layout& lb,
              T* d, const Layout& ld, void* workspace) {
  std::memset(workspace, 0xff, kWorkspace);  // as scratch is
  const bool ta = product.transpose[0], tb = product.transpose[1];
  const int64_t depth = ta ? la.rows : la.columns;
  for (int32_t batch = 0; batch < ld.batch; ++batch) {
    const T* at = a + batch * la.offset;
    const T* bt = b + batch * lb.offset;
    T* dt = d + batch * ld.offset;
    for (int64_t j = 0; j < ld.columns; ++j) {
      for (int64_t i = 0; i < ld.rows; ++i) {
        double sum = 0;
        for (int64_t k = 0; k < depth; ++k) {
          sum += static_cast<double>(ta ? at[k + i * la.leading] : at[i + k * la.leading]) *
                 (tb ? bt[j + k * lb.leading] : bt[k + j * lb.leading]);
        }
        if (product.epilogue & 4) sum += static_cast<const T*>(product.bias)[i];
        if ((product.epilogue & 2) && sum < 0) sum = 0;
        dt[i + j * ld.leading] = sum;
      }
    }
  }
}

}  // namespace

#define MAY_FAIL(name) \
  if (const int code = FakeFails(#name)) return code

extern "C" {

int fake_live_cublas(void) { return live; }

int cublasLtCreate(void** handle) {
  MAY_FAIL(cublasLtCreate);
  static int it;
  return *handle = &it, 0;
}
int cublasLtDestroy(void*) { return 0; }
int cublasLtMatmulDescCreate(Product** product, int compute, int) {
  MAY_FAIL(cublasLtMatmulDescCreate);
  ++live;
  return *product = new Product{compute}, 0;
}
int cublasLtMatmulDescDestroy(Product* product) { return --live, delete product, 0; }
int cublasLtMatmulDescSetAttribute(Product* product, int name, const void* value, size_t bytes) {
  MAY_FAIL(cublasLtMatmulDescSetAttribute);
  void* to = name == 3   ? static_cast<void*>(&product->transpose[0])
             : name == 4 ? &product->transpose[1]
             : name == 7 ? static_cast<void*>(&product->epilogue)
             : name == 8 ? &product->bias
                         : nullptr;
  if (to == nullptr || bytes != (name == 8 ? 8 : 4)) return kInvalid;
  return std::memcpy(to, value, bytes), 0;
}
int cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t rows, uint64_t columns,
                               int64_t leading) {
  MAY_FAIL(cublasLtMatrixLayoutCreate);
  ++live;
  *layout = new Layout{type, static_cast<int64_t>(rows), static_cast<int64_t>(columns), leading};
  return 0;
}
int cublasLtMatrixLayoutDestroy(Layout* layout) { return --live, delete layout, 0; }
int cublasLtMatrixLayoutSetAttribute(Layout* layout, int name, const void* value, size_t bytes) {
  MAY_FAIL(cublasLtMatrixLayoutSetAttribute);
  if (name == 5 && bytes == 4) return std::memcpy(&layout->batch, value, 4), 0;
  if (name == 6 && bytes == 8) return std::memcpy(&layout->offset, value, 8), 0;
  return kInvalid;
}
int cublasLtMatmulPreferenceCreate(void** preference) {
  MAY_FAIL(cublasLtMatmulPreferenceCreate);
  ++live;
  return *preference = new int, 0;
}
int cublasLtMatmulPreferenceDestroy(void* preference) {
  return --live, delete static_cast<int*>(preference), 0;
}
int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) {
  MAY_FAIL(cublasLtMatmulPreferenceSetAttribute);
  return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void*, const Product* product, const Layout* a, const Layout* b,
                                   const Layout*, const Layout* d, void*, int, Heuristic* found,
                                   int* count) {
  MAY_FAIL(cublasLtMatmulAlgoGetHeuristic);
  const bool ta = product->transpose[0], tb = product->transpose[1];
  const bool fits = (ta ? a->columns : a->rows) == d->rows &&
                    (tb ? b->rows : b->columns) == d->columns &&
                    (ta ? a->rows : a->columns) == (tb ? b->columns : b->rows) &&
                    a->batch == d->batch && b->batch == d->batch;
  if (!fits) return kInvalid;
  *count = d->type == kR32F || d->type == kR64F;
  found->workspace_bytes = kWorkspace;
  return found->state = 0, 0;
}
int cublasLtMatmul(void*, const Product* product, const void*, const void* a, const Layout* la,
                   const void* b, const Layout* lb, const void*, const void*, const Layout*,
                   void* d, const Layout* ld, const void*, void* workspace, size_t bytes,
                   void* stream) {
  MAY_FAIL(cublasLtMatmul);
  if (reinterpret_cast<uintptr_t>(workspace) % 256) return kInvalid;
  if (bytes < kWorkspace || reinterpret_cast<uintptr_t>(a) % 4) return kUnsupported;
  const auto run = [=, product = *product, la = *la, lb = *lb, ld = *ld] {
    if (ld.type == kR64F) {
      Multiply(product, static_cast<const double*>(a), la, static_cast<const double*>(b), lb,
               static_cast<double*>(d), ld, workspace);
    } else {
      Multiply(product, static_cast<const float*>(a), la, static_cast<const float*>(b), lb,
               static_cast<float*>(d), ld, workspace);
    }
  };
  FakeLaunch(stream, run);
  return 0;
}

}  // extern "C"
