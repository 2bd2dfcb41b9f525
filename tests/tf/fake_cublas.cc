// cuBLASLt without a GPU: plain loops, enqueued on streams of the fake driver, in column-major
// order. Its algorithms compute the same, in times that tests set, and some split the depth: these
// have parts of the result first, in the workspace, and add them up later.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include "fake_cuda.h"
#include "fake_numbers.h"

namespace {

constexpr int kInvalid = 7;
constexpr int kUnsupported = 15;
constexpr int kR32F = 0, kR64F = 1, kR16F = 2, kR16BF = 14;
constexpr int k32F = 68, k64F = 70, k32FFastTF32 = 77;
constexpr size_t kWorkspace = 1000;
// By what cuBLASLt expects of them. The last one is refused when it is to run.
constexpr int kAlgorithms = 5;
constexpr bool kSplits[kAlgorithms] = {true, false, true, false, false};

struct Product {
  int compute = 0;
  int scale = 0;
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

// What the last heuristic was asked for.
struct Preference {
  uint64_t workspace = 0;
  uint32_t reductions = 7;
  uint32_t alignment[4] = {};
};

struct Asked {
  int type = 0, compute = 0, scale = 0;
  uint32_t alignment = 0;
};

std::atomic<int> live{0};
float milliseconds[kAlgorithms] = {};
int runs[kAlgorithms] = {};
Asked asked;

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
                 static_cast<double>(tb ? bt[j + k * lb.leading] : bt[k + j * lb.leading]);
        }
        if (product.epilogue & 4)
          sum += static_cast<double>(static_cast<const T*>(product.bias)[i]);
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
void fake_cublas_time(int algorithm, float taken) { milliseconds[algorithm] = taken; }
int fake_cublas_runs(int algorithm) { return runs[algorithm]; }
// Of the last product: its type, what it is computed in, that of alpha, and the alignment.
void fake_cublas_asked(int* found) {
  const int values[] = {asked.type, asked.compute, asked.scale, static_cast<int>(asked.alignment)};
  std::memcpy(found, values, sizeof values);
}

int cublasLtCreate(void** handle) {
  MAY_FAIL(cublasLtCreate);
  static int it;
  return *handle = &it, 0;
}
int cublasLtDestroy(void*) { return 0; }
int cublasLtMatmulDescCreate(Product** product, int compute, int scale) {
  MAY_FAIL(cublasLtMatmulDescCreate);
  ++live;
  return *product = new Product{compute, scale}, 0;
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
int cublasLtMatmulPreferenceCreate(Preference** preference) {
  MAY_FAIL(cublasLtMatmulPreferenceCreate);
  ++live;
  return *preference = new Preference, 0;
}
int cublasLtMatmulPreferenceDestroy(Preference* preference) { return --live, delete preference, 0; }
int cublasLtMatmulPreferenceSetAttribute(Preference* preference, int name, const void* value,
                                         size_t bytes) {
  MAY_FAIL(cublasLtMatmulPreferenceSetAttribute);
  void* to = name == 1                ? static_cast<void*>(&preference->workspace)
             : name == 3              ? &preference->reductions
             : name >= 5 && name <= 8 ? &preference->alignment[name - 5]
                                      : nullptr;
  if (to == nullptr || bytes != (name == 1 ? 8 : 4)) return kInvalid;
  return std::memcpy(to, value, bytes), 0;
}
int cublasLtMatmulAlgoGetHeuristic(void*, const Product* product, const Layout* a, const Layout* b,
                                   const Layout*, const Layout* d, const Preference* preference,
                                   int most, Heuristic* found, int* count) {
  MAY_FAIL(cublasLtMatmulAlgoGetHeuristic);
  const bool ta = product->transpose[0], tb = product->transpose[1];
  const bool fits =
      (ta ? a->columns : a->rows) == d->rows && (tb ? b->rows : b->columns) == d->columns &&
      (ta ? a->rows : a->columns) == (tb ? b->columns : b->rows) && a->batch == d->batch &&
      b->batch == d->batch && a->type == d->type && b->type == d->type;
  if (!fits) return kInvalid;
  asked = {d->type, product->compute, product->scale, preference->alignment[0]};
  const bool wide = d->type == kR64F;
  const bool known =
      wide ? product->compute == k64F && product->scale == kR64F
           : product->scale == kR32F && (product->compute == k32F ||
                                         (product->compute == k32FFastTF32 && d->type == kR32F));
  *count = 0;
  if (!known) return kUnsupported;
  for (int i = 0; i < kAlgorithms && *count < most; ++i) {
    if (kSplits[i] && preference->reductions == 0) continue;
    Heuristic& made = found[(*count)++] = {};
    made.algorithm[0] = i;
    made.algorithm[1] = preference->alignment[0];
    made.workspace_bytes = kSplits[i] ? 2 * kWorkspace : kWorkspace;
  }
  return 0;
}
int cublasLtMatmul(void*, const Product* product, const void*, const void* a, const Layout* la,
                   const void* b, const Layout* lb, const void*, const void*, const Layout*,
                   void* d, const Layout* ld, const uint64_t* algorithm, void* workspace,
                   size_t bytes, void* stream) {
  MAY_FAIL(cublasLtMatmul);
  const int number = algorithm[0];
  if (number == kAlgorithms - 1) return kUnsupported;
  if (reinterpret_cast<uintptr_t>(workspace) % 256) return kInvalid;
  if (bytes < (kSplits[number] ? 2 : 1) * kWorkspace) return kUnsupported;
  for (const void* address : {a, b, static_cast<const void*>(d)}) {
    if (reinterpret_cast<uintptr_t>(address) % algorithm[1]) return kInvalid;
  }
  const auto run = [=, product = *product, la = *la, lb = *lb, ld = *ld](void* to) {
    const auto multiply = [&](auto type) {
      using T = decltype(type);
      Multiply(product, static_cast<const T*>(a), la, static_cast<const T*>(b), lb,
               static_cast<T*>(to), ld, workspace);
    };
    if (ld.type == kR64F) {
      multiply(double());
    } else if (ld.type == kR32F) {
      multiply(float());
    } else if (ld.type == kR16F) {
      multiply(_Float16());
    } else {
      multiply(Bfloat16());
    }
    ++runs[number];
    FakeSpend(milliseconds[number]);
  };
  if (!kSplits[number]) {
    FakeLaunch(stream, [=] { run(d); });
    return 0;
  }
  // All of the result lies in the workspace between its two kernels, as far as it fits.
  const int64_t numbers = ld->batch > 1 ? ld->offset * ld->batch : ld->rows * ld->columns;
  const size_t size = ld->type == kR64F ? 8 : ld->type == kR32F ? 4 : 2;
  const size_t kept = std::min<size_t>(numbers * size, kWorkspace);
  char* const parts = static_cast<char*>(workspace) + kWorkspace;
  FakeLaunch(stream, [=] {
    run(d);
    std::memcpy(parts, d, kept);
    std::memset(d, 0xff, kept);
  });
  FakeLaunch(stream, [=] { std::memcpy(d, parts, kept); });
  return 0;
}

}  // extern "C"
