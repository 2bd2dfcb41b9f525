// FusionKernel::Launch of a cooperative kernel: CTAs of each phase run at once wherever one slab of
// each piece does, and each piece has whole slabs.
// Prints what went wrong; exit status 0 if nothing.
#include <cstdio>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "custom_ops/ops/fusion/fusion_kernel.h"

namespace {

int failures = 0;

void Expect(bool holds, const std::string& what) {
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "not so: %s\n", what.c_str());
}

// A kernel of one phase, whose pieces want so many times their slabs, and say how many CTAs they
// have.
tfmem::FusionKernel KernelOf(const std::vector<int64_t>& wanted,
                             const std::vector<int64_t>& slabs) {
  tfmem::FusionKernel kernel;
  kernel.image.cooperative = true;
  for (size_t i = 0; i < wanted.size(); ++i) {
    tfmem::KernelSize count;
    count.number = wanted[i];
    tfmem::KernelPiece piece;
    piece.slabs = slabs[i];
    piece.factors.push_back({1, {count}});
    kernel.pieces.push_back(piece);
    tfmem::KernelWord word;
    word.kind = tfmem::KernelWord::Kind::kCtas;
    word.number = static_cast<int>(i);
    kernel.words.push_back(word);
  }
  return kernel;
}

void ExpectThree() {
  const auto launch = KernelOf({10000, 10000, 1}, {1, 1, 1}).Launch({}, 132);
  Expect(launch.ok(), "three pieces, of which one is small, run on 132 CTAs");
  Expect(launch.ok() && launch->numbers == std::vector<int64_t>{65, 65, 1}, "65, 65 and 1");
}

void ExpectRandom(std::mt19937* random) {
  const auto from = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(*random);
  };
  std::vector<int64_t> wanted, slabs;
  for (int64_t count = from(1, 6); count > 0; --count) {
    wanted.push_back(from(1, 100000));
    slabs.push_back(from(1, 8));
  }
  const int64_t least = std::accumulate(slabs.begin(), slabs.end(), int64_t{0});
  const int64_t resident = least - 1 + from(0, 200);
  const auto launch = KernelOf(wanted, slabs).Launch({}, resident);
  Expect(launch.ok() == (resident >= least), "it runs where one slab of each piece does");
  if (!launch.ok()) return;
  int64_t total = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const int64_t ctas = launch->numbers[i];
    total += ctas;
    Expect(ctas >= slabs[i] && ctas % slabs[i] == 0, "each piece has whole slabs");
    Expect(ctas <= wanted[i] * slabs[i], "no piece has more CTAs than it wants");
  }
  Expect(total <= resident, "all CTAs run at once");
}

}  // namespace

int main() {
  std::mt19937 random(0);
  ExpectThree();
  for (int i = 0; i < 2000; ++i) ExpectRandom(&random);
  return failures ? 1 : 0;
}
