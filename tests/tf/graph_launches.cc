// GpuGraph alone, on the fake driver whose streams lag behind: launches in flight, in any order.
// Prints what went wrong; exit status 0 if nothing.
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/cuda/gpu_graph.h"
#include "fake_cuda.h"

extern "C" int fake_live_graphs(void);
extern "C" int fake_live_execs(void);

namespace {

int failures = 0;

void Expect(bool holds, const std::string& what) {
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "not so: %s\n", what.c_str());
}

void ExpectOk(const absl::Status& status, const std::string& what) {
  Expect(status.ok(), absl::StrCat(what, ": ", status.message()));
}

// Adds the number at the first address to that at the second.
absl::Status Add(tfmem::cuda::Stream stream, absl::Span<const uint64_t> addresses) {
  const auto* from = reinterpret_cast<const int*>(addresses[0]);
  auto* to = reinterpret_cast<int*>(addresses[1]);
  FakeLaunch(stream, [from, to] { *to += *from; });
  return absl::OkStatus();
}

// Zeroes a separate number, then adds two numbers to it.
std::vector<tfmem::GraphStep> Sum() {
  std::vector<tfmem::GraphStep> steps(3);
  steps[0].zeros = sizeof(int);
  steps[1].enqueue = steps[2].enqueue = Add;
  steps[1].after = steps[2].after = {0};
  return steps;
}

std::vector<tfmem::GraphWords> Words(const int* a, const int* b, int* sum) {
  const auto address = [](const int* number) { return reinterpret_cast<uint64_t>(number); };
  return {{address(sum)}, {address(a), address(sum)}, {address(b), address(sum)}};
}

void TestInFlight(tfmem::GpuLink* link, tfmem::cuda::Stream one, tfmem::cuda::Stream other) {
  constexpr int kLaunches = 40;
  tfmem::GpuGraph graph(link, Sum());
  std::vector<int> numbers(kLaunches + 1), sums(kLaunches, -1);
  for (int i = 0; i <= kLaunches; ++i) numbers[i] = i;
  const int made = fake_calls("cuGraphInstantiateWithFlags");
  for (int i = 0; i < kLaunches; ++i) {
    ExpectOk(graph.Launch(i % 3 ? one : other, Words(&numbers[i], &numbers[i + 1], &sums[i])),
             "a launch");
    if (i % 7 == 0) FakeRunOne();
  }
  Expect(!FakeIdle(one) && !FakeIdle(other), "launches are in flight on both streams");
  Expect(fake_calls("cuGraphInstantiateWithFlags") == made + 1, "one graph for all of them");
  while (FakeRunOne()) {
  }
  for (int i = 0; i < kLaunches; ++i) {
    Expect(sums[i] == 2 * i + 1, absl::StrCat("sum ", i, " is ", sums[i]));
  }
}

// What is launched goes on though its graph is gone.
void TestGone(tfmem::GpuLink* link, tfmem::cuda::Stream stream) {
  const int a = 2, b = 3;
  int sum = 0;
  {
    tfmem::GpuGraph graph(link, Sum());
    ExpectOk(graph.Launch(stream, Words(&a, &b, &sum)), "a launch");
  }
  while (FakeRunOne()) {
  }
  Expect(sum == 5, "a launch outlives its graph");
  Expect(fake_live_graphs() == 0 && fake_live_execs() == 0, "graphs are gone");
}

void TestNothingSetTwice(tfmem::GpuLink* link, tfmem::cuda::Stream stream) {
  const int a = 2, b = 3;
  int sum = 0, other = 0;
  tfmem::GpuGraph graph(link, Sum());
  ExpectOk(graph.Launch(stream, Words(&a, &b, &sum)), "a launch");
  const int before = fake_calls("cuGraphExecChildGraphNodeSetParams");
  ExpectOk(graph.Launch(stream, Words(&a, &b, &sum)), "the same again");
  Expect(fake_calls("cuGraphExecChildGraphNodeSetParams") == before, "nothing moved");
  ExpectOk(graph.Launch(stream, Words(&b, &b, &sum)), "one operand moved");
  Expect(fake_calls("cuGraphExecChildGraphNodeSetParams") == before + 1, "one is captured again");
  while (FakeRunOne()) {
  }
  Expect(sum == 6, "three launches");
  fake_fail("cuGraphExecChildGraphNodeSetParams", 0, 1, 910);
  ExpectOk(graph.Launch(stream, Words(&a, &a, &other)), "made again where nothing can be set");
  while (FakeRunOne()) {
  }
  Expect(other == 4, "it is right then, too");
}

// Addresses that come in turn are captured once: for each set of them a version of the graph is
// kept.
void TestVersions(tfmem::GpuLink* link, tfmem::cuda::Stream stream) {
  constexpr int kCalls = 20, kSets = 6;
  std::vector<tfmem::GraphStep> steps(kCalls);
  for (int i = 0; i < kCalls; ++i) {
    steps[i].enqueue = Add;
    if (i > 0) steps[i].after = {i - 1};
  }
  tfmem::GpuGraph graph(link, std::move(steps));
  std::vector<int> from(kSets), sums(kSets);
  for (int i = 0; i < kSets; ++i) from[i] = i + 1;
  const auto launch = [&](int set) {
    const tfmem::GraphWords words = {reinterpret_cast<uint64_t>(&from[set]),
                                     reinterpret_cast<uint64_t>(&sums[set])};
    ExpectOk(graph.Launch(stream, std::vector<tfmem::GraphWords>(kCalls, words)), "a version");
  };
  const auto instantiated = [] { return fake_calls("cuGraphInstantiateWithFlags"); };
  const auto captured = [] { return fake_calls("cuStreamBeginCapture_v2"); };
  const int made = instantiated(), before = captured();
  for (int round = 0; round < 3; ++round) {
    for (int set = 0; set < 4; ++set) launch(set);
  }
  Expect(instantiated() == made + 4 && captured() == before + 4 * kCalls, "four versions");
  launch(4);
  Expect(instantiated() == made + 4 && captured() == before + 5 * kCalls, "no fifth version");
  launch(4);
  Expect(captured() == before + 5 * kCalls, "a version was changed, and kept");
  while (FakeRunOne()) {
  }
  for (int set = 0; set < kSets; ++set) {
    const int launches = set < 4 ? 3 : set == 4 ? 2 : 0;
    Expect(sums[set] == launches * kCalls * from[set], absl::StrCat("the sum of set ", set));
  }
}

// Without memory for a second version, the first is changed.
void TestNoMemoryForAVersion(tfmem::GpuLink* link, tfmem::cuda::Stream stream) {
  constexpr int kCalls = 20;
  std::vector<tfmem::GraphStep> steps(kCalls);
  for (tfmem::GraphStep& step : steps) step.enqueue = Add;
  tfmem::GpuGraph graph(link, std::move(steps));
  int from = 1, first = 0, second = 0;
  const auto words = [&](int* sum) {
    const tfmem::GraphWords each = {reinterpret_cast<uint64_t>(&from),
                                    reinterpret_cast<uint64_t>(sum)};
    return std::vector<tfmem::GraphWords>(kCalls, each);
  };
  ExpectOk(graph.Launch(stream, words(&first)), "the first version");
  fake_fail("cuGraphInstantiateWithFlags", 0, 1, 2);
  ExpectOk(graph.Launch(stream, words(&second)), "without memory for another version");
  while (FakeRunOne()) {
  }
  Expect(first == kCalls && second == kCalls, "both sums");
}

}  // namespace

int main() {
  auto* const one = static_cast<tfmem::cuda::Stream>(FakeNewStream());
  auto* const other = static_cast<tfmem::cuda::Stream>(FakeNewStream());
  auto link = tfmem::GpuLink::For(one);
  if (!link.ok()) return std::fprintf(stderr, "%s\n", link.status().ToString().c_str()), 1;
  for (unsigned seed = 1; seed < 5; ++seed) {
    FakeSeed(seed);
    TestInFlight(*link, one, other);
  }
  TestGone(*link, one);
  TestNothingSetTwice(*link, one);
  TestVersions(*link, one);
  TestNoMemoryForAVersion(*link, one);
  Expect(fake_violations().no_context == 0, "each call has its context");
  Expect(fake_violations().host_waits == 0, "the host waits for nothing");
  return failures == 0 ? 0 : 1;
}
