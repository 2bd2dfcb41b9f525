// One stage of one step of a sweep: a kernel that is launched for each, where the weights fit no
// chip (GRNN's fallback: products with the inputs before the loop, one fused kernel of the gates in
// each step), and where CTAs cannot wait for each other.
//
// What others send it finds in L2, as a kernel that exchanges through a grid does; the launch
// before has sent it all. What a thread keeps lies in scratch meanwhile, as do the weights, once
// those of the first step have laid them out.
#pragma once

#include "recurrent.cuh"

namespace tfmem {

// Stage `stage` of them, which is STAGE or follows it.
template <int STAGE, class Cell, class Sizes, class Sweeper, class Element, int WORDS>
__device__ __forceinline__ void one_stage(Sweeper& sweeper, const Context<Sizes, WORDS>& context,
                                          Element (&elements)[Sizes::kItems], int step, int stage) {
  if constexpr (STAGE < Cell::kStages) {
    if (stage == STAGE) {
      sweeper.products.template load<STAGE>(context, step == 0);
      sweeper.exchange.start();
      sweeper.template stage<STAGE>(elements, step);
    } else {
      one_stage<STAGE + 1, Cell>(sweeper, context, elements, step, stage);
    }
  }
}

template <class Cell, class Sizes, int WORDS>
__device__ __forceinline__ void sweep_stage(const Parameters<WORDS>& parameters, char* shared) {
  using Exchange = typename Sizes::Exchange;
  using Products = typename Sizes::template Products<WORDS>;
  const int group = static_cast<int>(parameters.word[kGroups]) + blockIdx.y;
  const int groups = static_cast<int>(parameters.word[kGroups] >> 32);
  const int step = static_cast<int>(parameters.word[kTurn]);
  const int stage = static_cast<int>(parameters.word[kTurn] >> 32);
  const Context<Sizes, WORDS> context = context_of<Sizes>(parameters, group, groups);
  char* scratch = reinterpret_cast<char*>(parameters.word[kScratch]) +
                  group * static_cast<long long>(Sizes::kScratch);

  zero_shared<Sizes>(shared);
  Exchange exchange(
      Place{shared, scratch, reinterpret_cast<int*>(parameters.word[kStatus]), cta_in_grid()});
  Products products(context, shared, scratch);
  Replicas<Sizes, Exchange, Products, WORDS> replicas(context, exchange, products, shared);
  using Sweeper = Sweep<Cell, Sizes, Exchange, Products, WORDS>;
  Sweeper sweeper{context,
                  exchange,
                  products,
                  replicas,
                  shared,
                  scratch,
                  Sweeper::row_of(threadIdx.x),
                  Sweeper::unit_of(threadIdx.x)};

  typename Cell::template Element<Sizes> elements[Sizes::kItems];
  const bool begun = context.time > 0 && (step > 0 || stage > 0);
  const bool ends = step + 1 >= context.time && stage + 1 == Cell::kStages;
  const long long stride = static_cast<long long>(Sizes::kCtas) * Sizes::kItems * Sizes::kThreads;
  float* kept = reinterpret_cast<float*>(scratch + Sizes::kKept) +
                blockIdx.x * (Sizes::kItems * Sizes::kThreads) + threadIdx.x;
#pragma unroll
  for (int item = 0; item < Sizes::kItems; ++item) {
    Cell::begin(elements[item], sweeper.port(step, item));
    if (begun) Cell::resume(elements[item], kept + item * Sizes::kThreads, stride);
  }
  if (context.time > 0) one_stage<0, Cell>(sweeper, context, elements, step, stage);
#pragma unroll
  for (int item = 0; item < Sizes::kItems; ++item) {
    Cell::leave(elements[item], kept + item * Sizes::kThreads, stride);
    if (ends) Cell::end(elements[item], sweeper.port(step, item));
  }
}

}  // namespace tfmem
