// TensorFlow's GPU allocator (BFC, best fit with coalescing), as far as it decides where things
// lie: `FindChunkPtr`, `SplitChunk` and `Merge` of bfc_allocator.cc.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace tfmem {

struct Chunk {
  int64_t address = 0, size = 0;
};

constexpr int64_t kRound = 256;
// A chunk is split if at least this much is left over, or if it is twice as large as asked for.
constexpr int64_t kKeepWhole = int64_t{1} << 27;

class FreeChunks {
 public:
  void Add(Chunk chunk) {
    const Pair by_size(chunk.size, chunk.address), by_address(chunk.address, chunk.size);
    sizes_.insert(std::lower_bound(sizes_.begin(), sizes_.end(), by_size), by_size);
    addresses_.insert(std::lower_bound(addresses_.begin(), addresses_.end(), by_address),
                      by_address);
  }

  int64_t Largest() const { return sizes_.empty() ? 0 : sizes_.back().first; }
  // Bytes of the free chunk that was last taken from.
  int64_t split() const { return split_; }

  // False if no free chunk is large enough.
  bool Allocate(int64_t nbytes, Chunk* chunk) {
    const int64_t wanted = std::max(kRound, (nbytes + kRound - 1) / kRound * kRound);
    const auto best = std::lower_bound(sizes_.begin(), sizes_.end(), Pair(wanted, -1));
    if (best == sizes_.end()) return false;
    *chunk = {best->second, best->first};
    split_ = chunk->size;
    Remove(*chunk);
    if (chunk->size >= 2 * wanted || chunk->size - wanted >= kKeepWhole) {
      Add({chunk->address + wanted, chunk->size - wanted});
      chunk->size = wanted;
    }
    return true;
  }

  // Gives a chunk back, and joins it with its neighbours.
  void Free(Chunk chunk) {
    const auto after =
        std::lower_bound(addresses_.begin(), addresses_.end(), Pair(chunk.address, -1));
    const bool joins_after =
        after != addresses_.end() && after->first == chunk.address + chunk.size;
    const bool joins_before = after != addresses_.begin() &&
                              std::prev(after)->first + std::prev(after)->second == chunk.address;
    const Chunk next = joins_after ? Chunk{after->first, after->second} : Chunk{};
    const Chunk before =
        joins_before ? Chunk{std::prev(after)->first, std::prev(after)->second} : Chunk{};
    if (joins_after) Remove(next);
    if (joins_before) Remove(before);
    Add({joins_before ? before.address : chunk.address, before.size + chunk.size + next.size});
  }

 private:
  using Pair = std::pair<int64_t, int64_t>;

  void Remove(Chunk chunk) {
    sizes_.erase(std::lower_bound(sizes_.begin(), sizes_.end(), Pair(chunk.size, chunk.address)));
    addresses_.erase(
        std::lower_bound(addresses_.begin(), addresses_.end(), Pair(chunk.address, chunk.size)));
  }

  std::vector<Pair> sizes_;      // (size, address), ascending: the first that fits is the best
  std::vector<Pair> addresses_;  // (address, size), ascending
  int64_t split_ = 0;
};

}  // namespace tfmem
