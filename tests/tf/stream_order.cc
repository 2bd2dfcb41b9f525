// Random steps of the "copy" mechanism on the fake CUDA driver: does every kernel see its data?
//
// Plays TensorFlow's part: an allocator that hands blocks out in the order of enqueueing, kernels
// on a compute stream, steps that end anywhere. Prints what went wrong; exit status 0 if nothing.
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "custom_ops/ops/counters.h"
#include "custom_ops/ops/memory/gpu_tickets.h"
#include "custom_ops/ops/memory/pinned_pool.h"
#include "fake_cuda.h"

namespace {

constexpr int kBlocks = 6;
constexpr size_t kWords = 64;

std::mt19937 host_random;
int wrong_words = 0;

int Random(int end) { return static_cast<int>(host_random() % end); }

// Blocks of device memory; a freed one is handed out again at once, as TensorFlow does it.
class Memory {
 public:
  Memory() {
    for (auto& block : blocks_) idle_.push_back(block);
  }
  bool full() const { return idle_.empty(); }
  // A block that frees itself with its last owner.
  std::shared_ptr<void> Allocate() {
    // The one that was freed last: that race is the tightest.
    int* block = idle_.back();
    idle_.pop_back();
    return std::shared_ptr<void>(
        block, [this](void* freed) { idle_.push_back(static_cast<int*>(freed)); });
  }

 private:
  int blocks_[kBlocks][kWords];
  std::vector<int*> idle_;
};

// As TensorFlow's virtual devices: each has separate memory and a separate stream, all share one
// GPU's context and so the link and the pinned pool.
struct Device {
  Memory memory;
  tfmem::cuda::Stream compute = static_cast<tfmem::cuda::Stream>(FakeNewStream());
};

void LaunchFill(Device* device, void* block, int value) {
  FakeLaunch(device->compute, [block, value] {
    for (size_t i = 0; i < kWords; ++i) static_cast<int*>(block)[i] = value;
  });
}

void LaunchCheck(Device* device, void* block, int value) {
  FakeLaunch(device->compute, [block, value] {
    for (size_t i = 0; i < kWords; ++i) wrong_words += static_cast<int*>(block)[i] != value;
  });
}

// The device gets a little further, or not at all.
void Advance() {
  for (int i = Random(4); i > 0; --i) FakeRunOne();
}

void Expect(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  std::exit(2);
}

// One tensor's way through a step, an op at a time.
struct Tensor {
  Device* device = nullptr;
  int value = 0;
  // Prefetched while the source is still there, which also makes the copy back meet the copy out.
  bool release_late = false;
  int stage = 0;
  std::shared_ptr<void> source;
  std::shared_ptr<void> target;
  std::shared_ptr<tfmem::CopyTicket> ticket;

  bool done() const { return stage == 6; }
  bool blocked() const {
    return (stage == 0 || stage == (release_late ? 2 : 3)) && device->memory.full();
  }

  void Next() {
    switch (stage++) {
      case 0:
        source = device->memory.Allocate();
        LaunchFill(device, source.get(), value);
        break;
      case 1:
        Offload();
        break;
      case 2:
        release_late ? Prefetch() : Release();
        break;
      case 3:
        release_late ? Release() : Prefetch();
        break;
      case 4:
        Expect(ticket->Await(device->compute, target.get()));
        LaunchCheck(device, target.get(), value);
        break;
      case 5:
        // The order in which the executor drops values is no one's to choose.
        if (Random(2) == 0) ticket.reset();
        target.reset();
        ticket.reset();
        break;
    }
  }

 private:
  void Offload() {
    auto started = tfmem::CopyTicket::Start(device->compute, "tensor", source.get(),
                                            kWords * sizeof(int), /*host_budget=*/0, source);
    Expect(started.status());
    ticket = *std::move(started);
    LaunchCheck(device, source.get(), value);
  }

  void Release() {
    Expect(ticket->Release(device->compute));
    source.reset();
  }

  void Prefetch() {
    target = device->memory.Allocate();
    LaunchFill(device, target.get(), -1);  // the block's last user, still running
    Expect(ticket->StartIn(device->compute, target.get(), target));
  }
};

// A tensor that is never offloaded: overwrites whatever block comes next.
void Noise(Device* device) {
  if (device->memory.full()) return;
  std::shared_ptr<void> block = device->memory.Allocate();
  const int value = -2 - Random(1000);
  LaunchFill(device, block.get(), value);
  LaunchCheck(device, block.get(), value);
}

void Step(Device* device, int first_value) {
  std::vector<Tensor> tensors(3);
  for (Tensor& tensor : tensors) {
    tensor.device = device;
    tensor.value = first_value++;
    tensor.release_late = Random(3) == 0;
  }
  const int abort_after = Random(3) == 0 ? Random(20) : 1000;
  for (int op = 0; op < abort_after; ++op) {
    std::vector<Tensor*> ready;
    for (Tensor& tensor : tensors) {
      if (!tensor.done() && !tensor.blocked()) ready.push_back(&tensor);
    }
    if (ready.empty()) break;
    ready[Random(static_cast<int>(ready.size()))]->Next();
    if (Random(3) == 0) Noise(device);
    Advance();
  }
  // What an aborted step leaves is dropped: tensors before tickets, which is the harder order.
  for (Tensor& tensor : tensors) {
    tensor.source.reset();
    tensor.target.reset();
    if (Random(2) == 0) Noise(device);
    tensor.ticket.reset();
    if (Random(2) == 0) Noise(device);
  }
}

}  // namespace

int main() {
  static Device devices[2];
  for (int seed = 0; seed < 200; ++seed) {
    host_random.seed(seed);
    FakeSeed(seed);
    tfmem::stall_timing() = seed % 2 == 1;
    for (int step = 0; step < 30; ++step) Step(&devices[Random(2)], 1000 * step);
  }
  while (FakeRunOne()) {
  }
  const tfmem::Counters& counters = tfmem::counters();
  const long tickets = counters.live_tickets;
  const long pinned = counters.pinned_bytes_in_use;
  const long allocated = counters.pinned_bytes_allocated;
  for (tfmem::GpuLink* link : tfmem::GpuLink::All()) link->CollectStalls();
  const long stall = counters.stall_ns;
  tfmem::TrimPinnedBlocks();
  for (tfmem::GpuLink* link : tfmem::GpuLink::All()) link->TrimEvents();
  const long events = counters.open_events;
  const long kept = counters.pinned_bytes_allocated;
  std::printf(
      "wrong words %d, calls without a context %d, host waits %d, live tickets %ld, pinned bytes "
      "in use %ld, allocated %ld, after trim %ld, events after trim %ld, driver errors %ld\n",
      wrong_words, fake_violations().no_context, fake_violations().host_waits, tickets, pinned,
      allocated, kept, events, static_cast<long>(counters.driver_errors));
  const bool right = wrong_words == 0 && fake_violations().no_context == 0 &&
                     fake_violations().host_waits == 0 && tickets == 0 && pinned == 0 &&
                     kept == 0 && events == 0 && stall > 0 && counters.offloads > 10000 &&
                     counters.driver_errors == 0;
  return right ? 0 : 1;
}
