#include "recurrent.cuh"
#include "product_fma.cuh"
#include "exchange_cluster.cuh"
namespace tfmem {
__constant__ BlockPlace kBlocks0[] = {{1, 4, 0, 0, false}, {1, 4, 0, 1, false}, {1, 4, 0, 2, false}, {1, 4, 0, 3, false}};
struct Cell {
static constexpr int kStages = 1;
struct Leaves {
float leaf_0;
float leaf_1;
float leaf_2;
float leaf_3;
};
template <class Sizes> struct Element : Leaves {
Leaves ahead;  // of the step after the next, where they are read so early
float state_0;
float state_1;
const typename Sizes::Value* input_0;
typename Sizes::Value* output_0;
};
template <int STAGE> __host__ __device__ static constexpr int sums() {
if (STAGE == 0) return 0;
return int();
}
template <int STAGE> __host__ __device__ static constexpr int sum_buffer() {
if (STAGE == 0) return -1;
return int();
}
template <int STAGE> __host__ __device__ static constexpr bool sends() {
if (STAGE == 0) return true;
return bool();
}
template <class E, class At> __device__ static void begin(E& element, const At& at) {
element.state_0 = at.template initial<2>();
element.state_1 = at.template initial<3>();
element.input_0 = at.template first<const typename At::Value, 0, 4>();
element.output_0 = at.template first<typename At::Value, 4, 1>();
load(element, element, at, at.step);
}
template <class E, class At> __device__ static void load(E& element, Leaves& to, const At& at, int step) {
to.leaf_0 = at.template read<0>(element.input_0, step);
to.leaf_1 = at.template read<1>(element.input_0, step);
to.leaf_2 = at.template read<2>(element.input_0, step);
to.leaf_3 = at.template read<3>(element.input_0, step);
at.template advance<4>(element.input_0);
}
template <class E, class At> __device__ static void stage(Tag<0>, E& element, const At& at) {
const float value_6 = at.template product<0, 0>();
const float value_8 = at.template product<0, 1>();
const float value_10 = at.template product<0, 2>();
const float value_12 = at.template product<0, 3>();
const float value_7 = element.leaf_0 + value_6;
const float value_9 = element.leaf_1 + value_8;
const float value_11 = element.leaf_2 + value_10;
const float value_13 = element.leaf_3 + value_12;
const float value_14 = sigmoid(value_7);
const float value_15 = sigmoid(value_9);
const float value_16 = sigmoid(value_13);
const float value_17 = hyperbolic_tangent(value_11);
const float value_18 = value_15 * element.state_1;
const float value_19 = value_14 * value_17;
const float value_20 = value_18 + value_19;
const float value_21 = hyperbolic_tangent(value_20);
const float value_22 = value_16 * value_21;
const float next_0 = value_22;
const float next_1 = value_20;
at.template send_state<0, 0>(next_0);
at.template write<1, 0>(element.output_0, value_22);
at.template advance<1>(element.output_0);
element.state_0 = next_0;
element.state_1 = next_1;
}
template <class E, class At> __device__ static void end(E& element, const At& at) {
at.template final_state<5>(element.state_0);
at.template final_state<6>(element.state_1);
}
template <class E> __device__ static void leave(const E& element, float* to, long long stride) {
to[0 * stride] = element.state_0;
to[1 * stride] = element.state_1;
}
template <class E> __device__ static void resume(E& element, const float* from, long long stride) {
element.state_0 = from[0 * stride];
element.state_1 = from[1 * stride];
}
__device__ static int initial_state(Tag<0>, int operand) {
switch (operand) {
case 0: return 2;
default: return 0;
}
}
__device__ static const BlockPlace& block(Tag<0>, int product, int operand) {
return kBlocks0[product * 1 + operand];
}
};

struct Shape0 {
static constexpr int kColumns = 64;
static constexpr int kThreads = 256;
static constexpr int kLanes = 16;
static constexpr int kThreadColumns = 4;
static constexpr int kChunks = 4;
static constexpr int kRegisters = 4;
static constexpr int kShared = 0;
static constexpr int kRows = 1;
static constexpr int kBlock = 1;
static constexpr int kStride = 256;
static constexpr int kResultStride = 64;
static constexpr int kSplit = 1;
static constexpr int kForm = 0;
static constexpr int kOperandScale = 16384;
};
struct Sizes {
using Value = float;
static constexpr int kUnits = 256;
static constexpr int kDirections = 1;
static constexpr int kCtas = 16;
static constexpr int kThreads = 256;
static constexpr int kTile = 16;
static constexpr int kSlices = 1;
static constexpr int kRows = 1;
static constexpr int kPaddedRows = 1;
static constexpr int kItems = 1;
static constexpr int kUnitLanes = 16;
static constexpr int kSumLanes = 0;
static constexpr int kReplicaItems = 0;
static constexpr int kStaging = 2320;
static constexpr int kKept = 0;
static constexpr int kZeroed = 2064;
static constexpr int kScratch = 0;
static constexpr int kPointersOfDirection = 7;
static constexpr int kFallback = 0;
static constexpr int kOperandScale = 16384;
static constexpr int kLargest = 0;
template <int I> __host__ __device__ static constexpr BufferShape buffer() {
if (I == 0) return {1, 16, 16, 256, 16, 0, 0, 1, 0, 0};
return {};
}
template <int I> __host__ __device__ static constexpr GemmShape gemm() {
if (I == 0) return {64, 256, 1, 4, 0, 0, 0, 0};
return {};
}
template <int STAGE> __host__ __device__ static constexpr bool has_gemm() { return STAGE == 0; }
// Those that STAGE waits for; all of them for -1.
template <int STAGE, class Function> __device__ static void for_buffers(Function&& function) {
if constexpr (STAGE == -1 || STAGE == 0) function(Tag<0>());
}
using Exchange = ClusterExchange<Sizes>;
template <int WORDS> struct Products {
FmaProduct<Shape0> gemm_0;
char* shared;
char* scratch;
__device__ Products(const Context<Sizes, WORDS>& context, char* shared, char* scratch)
: shared(shared), scratch(scratch) {}
template <int STAGE>
__device__ __forceinline__ void load(const Context<Sizes, WORDS>& context, bool lay_out) {
if constexpr (STAGE == kAllStages || STAGE == 0) { gemm_0.load(WeightSource<Cell, Sizes, 0, WORDS>{context}, reinterpret_cast<float4*>(shared + 2320), reinterpret_cast<float4*>(scratch + 0ll + context.cta * 0ll), results<0>(), lay_out); }
}
template <int STAGE, class Exchange>
__device__ __forceinline__ void run(const Exchange& exchange, int step) const {
if constexpr (STAGE == 0) { gemm_0.run(exchange.template operands<0>(step), reinterpret_cast<const float4*>(shared + 2320), reinterpret_cast<const float4*>(scratch + 0ll + blockIdx.x * 0ll)); }
}
template <int GEMM> __device__ float* results() const {
if constexpr (GEMM == 0) return reinterpret_cast<float*>(shared + 2064);
return nullptr;
}
template <int GEMM, int PRODUCT, class At> __device__ float result(const At& at) const {
constexpr bool kAll = gemm<GEMM>().replicated;
const int unit = kAll ? PRODUCT * kCtas * kTile + at.hidden_unit() : PRODUCT * kTile + at.unit;
const float* from = results<GEMM>() + unit;
if constexpr (GEMM == 0) return add<1, 64>(from, at.row);
return 0.0f;
}
template <int PARTIALS, int STRIDE> __device__ static float add(const float* from, int row) {
float sum = from[row * STRIDE];
#pragma unroll
for (int i = 1; i < PARTIALS; ++i) sum += from[(i * kPaddedRows + row) * STRIDE];
return sum;
}
};
};
}
extern "C" __global__ void __launch_bounds__(256, 1)
tfmem_recurrent(const __grid_constant__ tfmem::Parameters<14> parameters) {
TFMEM_DYNAMIC_SHARED(float4, memory);
tfmem::sweep<tfmem::Cell, tfmem::Sizes>(parameters, reinterpret_cast<char*>(memory));
}
