// Parts of TfmemRecurrent alone: how a GPU program is read, chosen and launched, on the fake CUDA
// driver; and how shares of phases run on a pool that gives too few threads, or gives them late.
// Prints what went wrong; exit status 0 if nothing.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/cpu/phases.h"
#include "custom_ops/ops/recurrent/recurrent_kernel.h"
#include "custom_ops/ops/sha256.h"
#include "fake_cuda.h"

namespace {

int failures = 0;

void Expect(bool holds, const std::string& what) {
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "not so: %s\n", what.c_str());
}

template <typename A, typename B>
void ExpectEqual(const A& found, const B& expected, const std::string& what) {
  Expect(found == expected, absl::StrCat(what, ": found ", found, ", expected ", expected));
}

void ExpectOk(const absl::Status& status, const std::string& what) {
  Expect(status.ok(), absl::StrCat(what, ": ", status.message()));
}

void ExpectError(const absl::Status& status, const std::string& part) {
  Expect(!status.ok() && status.message().find(part) != absl::string_view::npos,
         absl::StrCat("an error with '", part, "', found '", status.message(), "'"));
}

struct Fields {
  std::string kind = "cubin";
  int arch = 90;
  std::string fallback = "fallback plain\n";
  int rows = 4;
  int ctas = 32;
  int cluster = 1;
  int shared = 100 << 10;
  int scratch = 64;
  int cooperative = 1;
  int stages = 0;
  int max_batch = 8;
  std::string image = "image";
};

std::string Header(const std::string& format, const Fields& f) {
  return absl::StrCat(format, "\nkind ", f.kind, "\narch ", f.arch, "\nentry main\n", f.fallback,
                      "rows ", f.rows, "\nctas ", f.ctas, "\ncluster ", f.cluster,
                      "\nthreads 256\nshared ", f.shared, "\nscratch ", f.scratch, "\ncooperative ",
                      f.cooperative, "\nstages ", f.stages, "\nmax_batch ", f.max_batch);
}

absl::StatusOr<tfmem::RecurrentProgram> Program(const Fields& f) {
  const std::string digest = absl::StrCat("\ndigest ", tfmem::Sha256(f.image));
  return tfmem::ReadRecurrentProgram(Header("kernel 1", f) + digest, f.image);
}

absl::StatusOr<std::shared_ptr<tfmem::RecurrentKernel>> Load(tfmem::GpuLink* link,
                                                             const Fields& f) {
  absl::StatusOr<tfmem::RecurrentProgram> program = Program(f);
  if (!program.ok()) return program.status();
  return tfmem::RecurrentKernel::Load(link, *program);
}

// FIPS 180-4's own examples, and lengths around a block's end, against what Python computes.
void TestDigest() {
  ExpectEqual(tfmem::Sha256(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
              "of nothing");
  ExpectEqual(tfmem::Sha256("abc"),
              "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", "of abc");
  const std::pair<int, const char*> lengths[] = {
      {55, "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318"},
      {56, "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a"},
      {64, "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb"},
      {1000, "41edece42d63e8d9bf515a9ba6932e1c20cbc9f5a5d134645adb5db1b9737ea3"},
  };
  for (const auto& [length, digest] : lengths) {
    ExpectEqual(tfmem::Sha256(std::string(length, 'a')), digest, absl::StrCat("of ", length));
  }
}

void TestHeader() {
  Fields fields;
  fields.image = std::string("a\n\nb\0c", 6);
  absl::StatusOr<tfmem::RecurrentProgram> program = Program(fields);
  ExpectOk(program.status(), "a header");
  Expect(*program->image.code == fields.image, "code that has an empty line and a zero");
  ExpectEqual(program->fallback->entry, "plain", "fallback");
  ExpectEqual(program->groups(9, 2), 6, "groups of 4 rows of a batch of 9, two directions");
  Expect(Program(fields)->image.code == Program(fields)->image.code, "code is there once");
  ExpectError(tfmem::ReadRecurrentProgram("program 3\n\nx", "").status(), "found 'program 3'");
  fields.rows = 0;
  ExpectError(Program(fields).status(), "at line 6 word 2, found '0' in 'rows 0'");
  fields = {};
  fields.kind = "source";
  ExpectError(Program(fields).status(), "expected cubin or ptx");
  fields = {};
  fields.cluster = 5;
  ExpectError(Program(fields).status(), "clusters of 5");
}

// What a graph calls the digest of its code is a stranger's word.
void TestStrangersCode() {
  Fields fields;
  fields.image = "ours";
  absl::StatusOr<tfmem::RecurrentProgram> ours = Program(fields);
  ExpectOk(ours.status(), "our program");
  const std::string text =
      absl::StrCat(Header("kernel 1", fields), "\ndigest ", ours->image.digest);
  ExpectError(tfmem::ReadRecurrentProgram(text, "theirs").status(),
              "the code of a kernel has the digest");
  Expect(tfmem::ReadRecurrentProgram(text, "ours")->image.code == ours->image.code,
         "ours is shared");
  ExpectError(tfmem::ReadRecurrentProgram(text, "").status(), "no code");
  ExpectError(tfmem::ReadRecurrentProgram(Header("kernel 1", fields), "ours").status(),
              "no digest");
}

// 132 processors hold 4 groups of 32 CTAs, so 6 groups take two launches; then the fallback,
// once.
void TestCooperativeLaunches(tfmem::GpuLink* link, tfmem::cuda::Stream stream) {
  auto kernel = Load(link, {});
  ExpectOk(kernel.status(), "loading");
  ExpectEqual(fake_modules().largest_shared, 100 << 10, "shared memory asked for");
  tfmem::KernelParameter parameter(100, 9, tfmem::SequenceLines::Of(100, 9, true), 0x1000, 0x2000,
                                   {false, true});
  parameter.Add(std::vector<const void*>{reinterpret_cast<void*>(0x3000)});
  fake_device().parameter_words = parameter.words.size();
  ExpectOk((*kernel)->Launch(stream, &parameter, 6), "launching");
  ExpectOk((*kernel)->LaunchFallback(stream, &parameter, 6), "launching the fallback");
  while (FakeRunOne()) {
  }
  const std::vector<FakeKernelLaunch>& launches = fake_launches();
  ExpectEqual(launches.size(), 3u, "launches");
  if (launches.size() != 3) return;
  for (int i = 0; i < 2; ++i) {
    ExpectEqual(launches[i].kernel, "main", "kernel");
    ExpectEqual(launches[i].blocks, 32u, "CTAs of a group");
    ExpectEqual(launches[i].groups, i == 0 ? 4u : 2u, "groups");
    ExpectEqual(launches[i].words[1], (i == 0 ? 0ull : 4ull) | 6ull << 32, "first and all groups");
    Expect(launches[i].cooperative, "a cooperative launch");
    ExpectEqual(launches[i].shared_bytes, 100u << 10, "shared memory");
  }
  ExpectEqual(launches[2].kernel, "plain", "kernel");
  ExpectEqual(launches[2].blocks, 1u, "CTAs of a group of the fallback");
  ExpectEqual(launches[2].groups, 6u, "groups of the fallback");
  Expect(!launches[2].cooperative, "a plain launch");
  const std::vector<uint64_t> words = {100 | 9ull << 32, 6ull << 32, 0x1000, 0x2000, 2,
                                       1 | 100ull << 32, 0,          0x3000};
  Expect(launches[2].words == words, "the kernel's parameter");
}

// Each group of 200 CTAs is more than the 132 processors hold; no CTA waits for another.
void TestLaunchesOfStages(tfmem::GpuLink* link, tfmem::cuda::Stream stream) {
  Fields fields;
  fields.ctas = 200;
  fields.cooperative = 0;
  fields.stages = 2;
  fields.fallback = "";
  auto kernel = Load(link, fields);
  ExpectOk(kernel.status(), "loading a kernel of stages");
  for (int time : {3, 0}) {
    tfmem::KernelParameter parameter(time, 9, tfmem::SequenceLines::Of(time, 9, false), 0, 0,
                                     {false});
    fake_device().parameter_words = parameter.words.size();
    fake_launches().clear();
    ExpectOk((*kernel)->Launch(stream, &parameter, 6), "launching");
    while (FakeRunOne()) {
    }
    std::vector<uint64_t> turns;
    for (const FakeKernelLaunch& launch : fake_launches()) {
      ExpectEqual(launch.groups, 6u, "groups of a launch");
      Expect(!launch.cooperative, "a plain launch");
      turns.push_back(launch.words[6]);
    }
    const uint64_t second = 1ull << 32;
    const std::vector<uint64_t> all = {0, second, 1, 1 | second, 2, 2 | second}, last = {second};
    Expect(turns == (time > 0 ? all : last), "each stage of each step, in order");
  }
}

void TestClusters(tfmem::GpuLink* link, tfmem::cuda::Stream stream) {
  Fields fields;
  fields.ctas = fields.cluster = 16;
  fields.cooperative = 0;
  fields.fallback = "";
  auto kernel = Load(link, fields);
  ExpectOk(kernel.status(), "loading a kernel of clusters");
  Expect(fake_modules().large_clusters, "clusters of more than 8 have to be allowed");
  tfmem::KernelParameter parameter(1, 1, tfmem::SequenceLines::Of(1, 1, false), 0, 0, {false});
  fake_launches().clear();
  ExpectOk((*kernel)->Launch(stream, &parameter, 70000), "launching");
  while (FakeRunOne()) {
  }
  ExpectEqual(fake_launches().size(), 2u, "launches of more groups than a grid takes");
  ExpectEqual(fake_launches()[0].cluster, 16u, "CTAs of a cluster");
  ExpectEqual(fake_launches()[0].groups + fake_launches()[1].groups, 70000u, "groups");
}

void TestChoice(tfmem::GpuLink* link) {
  Fields first, older, last;
  first.max_batch = 2;
  first.image = "first";
  older.arch = 80;
  last.max_batch = 16;
  last.image = "last";
  tfmem::RecurrentKernels kernels({Program(first), Program(older), Program(last)});
  auto image = [&](int64_t batch) {
    auto kernel = kernels.Choose(link, batch);
    return kernel.ok() ? *(*kernel)->program().image.code : std::string(kernel.status().message());
  };
  ExpectEqual(image(2), "first", "for a batch of 2");
  ExpectEqual(image(3), "last", "for a batch of 3, the cubin for 8.0 does not load on 9.0");
  ExpectEqual(image(1000), "last", "for a batch of 1000");

  Fields newer, portable;
  newer.arch = 100;
  portable.kind = "ptx";
  portable.arch = 80;
  portable.image = "portable";
  tfmem::RecurrentKernels exported({Program(older), Program(newer), Program(portable)});
  ExpectEqual(*(*exported.Choose(link, 1))->program().image.code, "portable",
              "where no cubin is for 9.0, PTX of 8.0");

  Fields stages;
  stages.ctas = 200;
  stages.cooperative = 0;
  stages.stages = 1;
  stages.max_batch = 0;
  stages.image = "stages";
  Fields grid = last;
  grid.ctas = 133;
  Expect(kernels.WithoutWaiting(link) == nullptr, "the first of these is a grid");
  tfmem::RecurrentKernels both({Program(stages), Program(last)}),
      small({Program(stages), Program(grid)});
  ExpectEqual(*(*both.Choose(link, 1000))->program().image.code, "last", "where its CTAs can wait");
  ExpectEqual(*both.WithoutWaiting(link)->program().image.code, "stages", "where they cannot");
  ExpectEqual(*(*small.Choose(link, 1))->program().image.code, "stages",
              "where a group does not fit");

  Fields large, group, ptx;
  large.shared = 300 << 10;
  group.ctas = 133;
  ptx.kind = "ptx";
  ptx.arch = 100;
  tfmem::RecurrentKernels none({Program(older), Program(large), Program(group), Program(ptx)});
  absl::Status status = none.Choose(link, 1).status();
  ExpectError(status, "program 0: it is for compute capability 8.0, this GPU has 9.0");
  ExpectError(status, "program 1: a CTA of it needs 307200 bytes of shared memory");
  ExpectError(status, "program 2: a group of 133 CTAs does not fit");
  ExpectError(status, "program 3: it is for compute capability 10.0 and later");
}

void TestStatus(tfmem::GpuLink* link, tfmem::cuda::Stream stream) {
  tfmem::StatusWatch watch;
  int32_t status = 0;
  const int waits = fake_violations().host_waits;
  ExpectOk(watch.Read(link, stream, &status), "reading a status");
  Expect(!*watch.Failed(), "nothing has come back");
  while (FakeRunOne()) {
  }
  Expect(!*watch.Failed(), "a status of zero");
  FakeLaunch(stream, [&status] { status = tfmem::kStatusTooLarge; });
  ExpectOk(watch.Read(link, stream, &status), "reading a status");
  while (FakeRunOne()) {
  }
  Expect(!*watch.Failed(), "a value that was too large says nothing about the next call");
  FakeLaunch(stream, [&status] { status = tfmem::kStatusWaited; });
  ExpectOk(watch.Read(link, stream, &status), "reading a status");
  Expect(!*watch.Failed(), "the kernel has not run");
  while (FakeRunOne()) {
  }
  status = 0;
  Expect(*watch.Failed() && *watch.Failed(), "a failure is remembered");
  ExpectEqual(fake_violations().host_waits, waits, "waits of the host");
}

// A pool of one thread, some of whose closures never run, run at once, or run after all is done.
void TestPhases(unsigned seed) {
  std::mt19937 random(seed);
  const int64_t phases = 1 + random() % 50;
  const int shares = 1 + random() % 5;
  const int threads = 1 + random() % 4;
  std::vector<std::thread> pool;
  std::vector<std::function<void()>> late;
  std::mutex mutex;
  std::vector<std::atomic<int>> done(phases * shares);
  std::atomic<int64_t> wrong{0};
  std::atomic<int64_t> finished{0};
  auto schedule = [&](std::function<void()> closure) {
    std::lock_guard<std::mutex> lock(mutex);
    const unsigned fate = random() % 4;
    if (fate == 0) late.push_back(std::move(closure));
    if (fate >= 2) pool.emplace_back(std::move(closure));
  };
  tfmem::RunPhases(phases, shares, threads, schedule, [&](int64_t phase, int share) {
    if (finished.load() / shares != phase) ++wrong;  // not before the phase before is done
    if (done[phase * shares + share]++ != 0) ++wrong;
    if (share == 1 && phase % 16 == 3) std::this_thread::yield();
    ++finished;
  });
  ExpectEqual(finished.load(), phases * shares, "shares that were done when RunPhases returned");
  ExpectEqual(wrong.load(), 0, "shares done twice or too early");
  for (size_t i = 0;; ++i) {  // a thread may still invite another one
    std::unique_lock<std::mutex> lock(mutex);
    if (i == pool.size()) break;
    std::thread thread = std::move(pool[i]);
    lock.unlock();
    thread.join();
  }
  for (const std::function<void()>& closure : late) closure();
  ExpectEqual(finished.load(), phases * shares, "shares that were done in all");
}

}  // namespace

int main() {
  TestDigest();
  TestHeader();
  TestStrangersCode();
  auto stream = static_cast<tfmem::cuda::Stream>(FakeNewStream());
  absl::StatusOr<tfmem::GpuLink*> link = tfmem::GpuLink::For(stream);
  ExpectOk(link.status(), "a link");
  TestCooperativeLaunches(*link, stream);
  TestLaunchesOfStages(*link, stream);
  TestClusters(*link, stream);
  TestChoice(*link);
  TestStatus(*link, stream);
  const int loaded = fake_modules().loaded;
  ExpectOk(Load(*link, {}).status(), "loading again");
  ExpectEqual(fake_modules().loaded, loaded, "modules, each loaded once");
  tfmem::TrimGpuKernels();
  ExpectEqual(fake_modules().unloaded, loaded, "modules unloaded at the end");
  ExpectEqual(fake_violations().no_context, 0, "calls without a context");
  for (unsigned seed = 0; seed < 300; ++seed) TestPhases(seed);
  return failures == 0 ? 0 : 1;
}
