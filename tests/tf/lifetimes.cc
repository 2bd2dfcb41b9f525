// What copies and kernels touch outlives them, also where the driver fails in the middle; on the
// fake CUDA driver. Prints what went wrong; exit status 0 if nothing.
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/counters.h"
#include "custom_ops/ops/memory/gpu_tickets.h"
#include "custom_ops/ops/memory/pinned_pool.h"
#include "custom_ops/ops/recurrent/recurrent_kernel.h"
#include "custom_ops/ops/sha256.h"
#include "fake_cuda.h"

namespace {

constexpr size_t kWords = 64;
constexpr size_t kBytes = kWords * sizeof(int);

int failures = 0;

void Expect(bool holds, const std::string& what) {
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "not so: %s\n", what.c_str());
}

struct World {
  tfmem::cuda::Stream compute = static_cast<tfmem::cuda::Stream>(FakeNewStream());
  tfmem::GpuLink* link = *tfmem::GpuLink::For(compute);
};

// A block of TensorFlow's, which sees whether a private stream still runs when it is freed.
struct Buffer {
  std::vector<int> words = std::vector<int>(kWords, 7);
  int freed = 0;
  int freed_too_early = 0;

  tfmem::Owner Own(const World& world) {
    return tfmem::Owner(words.data(), [this, world](void*) {
      ++freed;
      freed_too_early += !FakeIdle(world.link->out_stream()) || !FakeIdle(world.link->in_stream());
    });
  }
};

long PinnedInUse() { return tfmem::counters().pinned_bytes_in_use; }

// Whether the pool's next block stays as it is written, whatever is still enqueued.
bool PoolIsSafe(const World& world) {
  absl::StatusOr<tfmem::PinnedBlock> block =
      tfmem::PinnedBlock::Acquire(world.link, kBytes, 0, "next");
  int* words = static_cast<int*>(block->data());
  if (block->last_use()) {  // which its next user waits for
    while (!*block->last_use().Passed()) FakeRunOne();
  }
  for (size_t i = 0; i < kWords; ++i) words[i] = 1000 + i;
  while (FakeRunOne()) {
  }
  for (size_t i = 0; i < kWords; ++i) {
    if (words[i] != static_cast<int>(1000 + i)) return false;
  }
  return true;
}

auto Start(const World& world, Buffer* buffer) {
  return tfmem::CopyTicket::Start(world.compute, "tensor", buffer->words.data(), kBytes, 0,
                                  buffer->Own(world));
}

void TestCopyOutWithoutEvent(const World& world, bool drains) {
  const std::string what = absl::StrCat("copy out, ", drains ? "waited for" : "lost", ": ");
  Buffer source;
  const long before = PinnedInUse();
  fake_failures().event_record = {1, 1};  // the first is the compute stream's position
  fake_failures().stream_synchronize = {0, drains ? 0 : 1};
  Expect(!Start(world, &source).ok(), what + "the failure is the step's");
  Expect(source.freed == drains, what + "the source is freed exactly if its copy is done");
  Expect(source.freed_too_early == 0, what + "the source is kept while it is copied");
  Expect((PinnedInUse() == before) == drains, what + "the block goes back if its copy is done");
  Expect(PoolIsSafe(world), what + "no other op gets the block meanwhile");
}

void TestCopyInWithoutEvent(const World& world, bool drains) {
  const std::string what = absl::StrCat("copy in, ", drains ? "waited for" : "lost", ": ");
  Buffer source, target;
  const long before = PinnedInUse();
  auto ticket = Start(world, &source);
  Expect(ticket.ok() && (*ticket)->Release(world.compute).ok(), what + "the way out");
  fake_failures().event_record = {1, 1};
  fake_failures().stream_synchronize = {0, drains ? 0 : 1};
  Expect(!(*ticket)->StartIn(world.compute, target.words.data(), target.Own(world)).ok(),
         what + "the failure is the step's");
  Expect(target.freed == drains, what + "the target is freed exactly if its copy is done");
  ticket->reset();
  Expect(target.freed_too_early == 0, what + "the target is kept while it is written");
  Expect((PinnedInUse() == before) == drains, what + "the block goes back if its copy is done");
  Expect(PoolIsSafe(world), what + "no other op gets the block meanwhile");
}

// An aborted step, whose ticket cannot make the compute stream wait.
void TestNoWaitAtTheEnd(const World& world, bool drains) {
  const std::string what = absl::StrCat("aborted, ", drains ? "waited for" : "lost", ": ");
  Buffer source, target;
  const long before = PinnedInUse();
  auto ticket = Start(world, &source);
  Expect((*ticket)->StartIn(world.compute, target.words.data(), target.Own(world)).ok(),
         what + "the way in");
  fake_failures().stream_wait_event = {0, 2};
  fake_failures().stream_synchronize = {0, drains ? 0 : 2};
  ticket->reset();
  for (const Buffer* buffer : {&source, &target}) {
    Expect(buffer->freed == drains, what + "a buffer is freed exactly if its copy is done");
    Expect(buffer->freed_too_early == 0, what + "a buffer is kept while it is copied");
  }
  Expect((PinnedInUse() == before) == drains, what + "the block goes back if its copy is done");
  Expect(PoolIsSafe(world), what + "no other op gets the block meanwhile");
}

void TestStatusWithoutEvent(const World& world) {
  tfmem::TrimPinnedBlocks();
  tfmem::StatusWatch watch;
  const int status = 0;
  fake_failures().event_record = {0, 1};
  Expect(!watch.Read(world.link, world.compute, &status).ok(), "the failure is the step's");
  Expect(FakeIdle(world.compute), "the status's block goes back when its copy is done");
  Expect(watch.Read(world.link, world.compute, &status).ok(), "the next one is read");
  while (FakeRunOne()) {
  }
}

// A large block is memory of the system's that is locked, or the driver's where it cannot be.
void TestLargeBlocks(const World& world) {
  constexpr size_t kBlock = (size_t{40} << 20) + 12;
  tfmem::TrimPinnedBlocks();
  const int driver = fake_locked().allocated;
  for (const bool fails : {false, true}) {
    fake_failures().host_register = {0, fails ? 1 : 0};
    {
      auto block = tfmem::PinnedBlock::Acquire(world.link, kBlock, 0, "large");
      Expect(block.ok(), "a large block is there");
      Expect(fake_locked().registered == (fails ? 0 : 1), "it is locked if it can be");
      Expect(fake_locked().allocated - driver == (fails ? 1 : 0), "else the driver allocates one");
      char* bytes = static_cast<char*>(block->data());
      bytes[0] = bytes[kBlock - 1] = 1;
    }
    tfmem::TrimPinnedBlocks();
    Expect(fake_locked().registered == 0 && fake_locked().allocated == driver, "it is freed");
  }
}

// Of idle blocks those stay that are taken between the mark and the trim.
void TestUnusedBlocksAreFreed(const World& world) {
  const auto take = [&](size_t bytes) {
    (void)tfmem::PinnedBlock::Acquire(world.link, bytes, 0, "block");
  };
  tfmem::TrimPinnedBlocks();
  const int before = fake_locked().allocated;
  take(64);
  take(128);
  tfmem::MarkPinnedBlocksUnused();
  Expect(fake_locked().allocated - before == 2, "marking frees nothing");
  take(128);
  tfmem::TrimUnusedPinnedBlocks();
  Expect(fake_locked().allocated - before == 1, "what was not taken since is freed");
  take(128);
  Expect(fake_locked().allocated - before == 1, "what was taken stays");
}

absl::StatusOr<tfmem::RecurrentProgram> Program(int max_batch) {
  const std::string code = absl::StrCat("image ", max_batch);
  return tfmem::ReadRecurrentProgram(
      absl::StrCat("kernel 1\nkind cubin\narch 90\nentry main\nrows 4\nctas 1\ncluster 1\nthreads "
                   "32\nshared 0"
                   "\nscratch 0\ncooperative 0\nstages 0\nmax_batch ",
                   max_batch, "\ndigest ", tfmem::Sha256(code)),
      code);
}

// Mechanism "managed": pages move out and back behind what computed them, and a new tensor's pages
// are there before it is written (pre-access).
void TestManaged(const World& world) {
  Buffer source;
  const auto started = [&] {
    return tfmem::ManagedTicket::Start(world.compute, "tensor", source.words.data(), kBytes,
                                       source.Own(world));
  };
  Expect(absl::IsFailedPrecondition(started().status()), "ordinary memory is refused");
  Expect(!tfmem::MoveToDevice(world.compute, source.words.data(), kBytes, "new").ok(),
         "ordinary memory is not pre-accessed");
  FakeUnified& unified = fake_unified();
  unified.on = true;
  bool computed = false;
  FakeLaunch(world.compute, [&] {
    computed = true;
    Expect(unified.migrations.empty(), "no page moves before the tensor is computed");
  });
  auto ticket = started();
  Expect(ticket.ok() && (*ticket)->Release(world.compute).ok(), "the way out");
  Expect((*ticket)->StartIn(world.compute, source.words.data(), source.Own(world)).ok(),
         "the way in");
  Expect((*ticket)->Await(world.compute, source.words.data()).ok(), "the wait");
  Expect(tfmem::MoveToDevice(world.compute, source.words.data(), 2 * sizeof(int), "new").ok(),
         "a pre-access");
  while (FakeRunOne()) {
  }
  Expect(computed, "the kernel ran");
  const std::vector<FakeMigration>& moved = unified.migrations;
  Expect(moved.size() == 3 && moved[0].device == -1 && moved[1].device == world.link->device() &&
             moved[2].device == world.link->device(),
         "out, back, and the pre-access");
  Expect(moved.size() == 3 && moved[0].bytes == kBytes && moved[1].bytes == kBytes &&
             moved[2].bytes == 2 * sizeof(int),
         "all bytes of each");
  unified = {};
}

void TestMemoryForAModuleComesBack(const World& world) {
  tfmem::RecurrentKernels kernels({Program(4), Program(8)});
  fake_failures().module_load = {0, 2};
  Expect(absl::IsResourceExhausted(kernels.Choose(world.link, 1).status()), "out of memory");
  fake_failures().module_load = {0, 1};
  auto other = kernels.Choose(world.link, 1);
  Expect(other.ok() && (*other)->program().max_batch == 8, "the one that there is memory for");
  auto best = kernels.Choose(world.link, 1);
  Expect(best.ok() && (*best)->program().max_batch == 4, "the best, once there is memory again");
}

void TestModulesOutliveTheirKernels(const World& world) {
  auto kernel = tfmem::RecurrentKernel::Load(world.link, *Program(16));
  tfmem::KernelParameter parameter(1, 1, tfmem::SequenceLines::Of(1, 1, false), 0, 0, {false});
  Expect((*kernel)->Launch(world.compute, &parameter, 1).ok(), "a launch");
  kernel->reset();
  const int unloaded = fake_modules().unloaded;
  tfmem::TrimGpuKernels();
  Expect(fake_modules().unloaded > unloaded, "a module that no op holds is unloaded");
  Expect(fake_modules().unloaded_while_busy == 0, "no module is unloaded while a kernel may run");
}

}  // namespace

int main() {
  const World world;
  for (bool drains : {true, false}) {
    TestCopyOutWithoutEvent(world, drains);
    TestCopyInWithoutEvent(world, drains);
    TestNoWaitAtTheEnd(world, drains);
  }
  TestStatusWithoutEvent(world);
  TestLargeBlocks(world);
  TestUnusedBlocksAreFreed(world);
  TestManaged(world);
  TestMemoryForAModuleComesBack(world);
  TestModulesOutliveTheirKernels(world);
  Expect(fake_violations().no_context == 0, "every call has a context");
  return failures == 0 ? 0 : 1;
}
