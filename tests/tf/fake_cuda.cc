// A CUDA driver without a GPU, for test_stream_order.py, test_recurrent_parts.py and
// test_fusion_gpu.py: streams are queues whose heads run in random order, as far as events allow.
// What may go wrong on a GPU once in a million goes wrong here soon, and the same way each time.
#include "fake_cuda.h"

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>

#include "../cuda_on_cpu/threads.h"

namespace {

// True once what was recorded has run.
using Mark = std::shared_ptr<bool>;

struct FakeEvent {
  Mark mark;                    // null: never recorded, which counts as passed
  std::shared_ptr<float> time;  // of the device, when it has passed
};

// A task that returns false has to wait.
struct FakeStream {
  std::deque<std::function<bool()>> tasks;
  FakeTasks* captured = nullptr;  // what it is given is not run, but put there
};

struct World {
  std::set<FakeStream*> streams;
  std::mt19937 random{1};
  FakeViolations violations;
  std::map<std::string, FakeFailure> failures;
  std::map<std::string, int> calls;
  bool at_once = false;  // no stream lags behind
  float spent = 0;       // milliseconds
};

thread_local int context_depth = 0;

#define ONE_AT_A_TIME std::lock_guard<std::recursive_mutex> lock(fake_mutex())

World& world() {
  static World instance;
  return instance;
}

FakeStream* Stream(void* stream) { return static_cast<FakeStream*>(stream); }
FakeEvent* Event(void* event) { return static_cast<FakeEvent*>(event); }

void NeedsContext() { FakeNeedsContext(); }

constexpr int kNotReady = 600;
constexpr int kUnknown = 999;

bool Passed(FakeEvent* event) { return event->mark == nullptr || *event->mark; }

#define MAY_FAIL(name) \
  if (const int code = FakeFails(#name)) return code

}  // namespace

std::recursive_mutex& fake_mutex() {
  static std::recursive_mutex instance;
  return instance;
}

void FakeNeedsContext() {
  if (context_depth == 0) ++world().violations.no_context;
}

int FakeBusyStreams() {
  ONE_AT_A_TIME;
  const auto& streams = world().streams;
  return std::count_if(streams.begin(), streams.end(),
                       [](const FakeStream* stream) { return !stream->tasks.empty(); });
}

void* FakeNewStream() {
  ONE_AT_A_TIME;
  auto* stream = new FakeStream;
  world().streams.insert(stream);
  return stream;
}

void FakeLaunch(void* stream, std::function<void()> kernel) {
  ONE_AT_A_TIME;
  if (FakeTasks* captured = Stream(stream)->captured) {
    captured->push_back(std::move(kernel));
    return;
  }
  Stream(stream)->tasks.push_back([kernel = std::move(kernel)] {
    kernel();
    return true;
  });
  while (world().at_once && FakeRunOne()) {
  }
}

extern "C" void fake_run_at_once(void) { world().at_once = true; }

void FakeSpend(float milliseconds) {
  ONE_AT_A_TIME;
  world().spent += milliseconds;
}

void FakeLaunchWhen(void* stream, std::function<bool()> ready) {
  ONE_AT_A_TIME;
  Stream(stream)->tasks.push_back(std::move(ready));
}

void FakeCapture(void* stream, FakeTasks* captured) {
  ONE_AT_A_TIME;
  Stream(stream)->captured = captured;
}

bool FakeCaptures(void* stream) {
  ONE_AT_A_TIME;
  return Stream(stream)->captured != nullptr;
}

int FakeFails(const char* function) {
  ONE_AT_A_TIME;
  ++world().calls[function];
  FakeFailure& failure = world().failures[function];
  return failure.Due() ? failure.code : 0;
}

extern "C" void fake_fail(const char* function, int after, int times, int code) {
  ONE_AT_A_TIME;
  world().failures[function] = {after, times, code};
}

extern "C" int fake_calls(const char* function) {
  ONE_AT_A_TIME;
  return world().calls[function];
}

extern "C" int fake_kernel_errors(void) { return fake_kernel_error_count(); }

int& fake_kernel_error_count() {
  static int count = 0;
  return count;
}

bool FakeRunOne() {
  ONE_AT_A_TIME;
  std::vector<FakeStream*> busy;
  for (FakeStream* stream : world().streams) {
    if (!stream->tasks.empty()) busy.push_back(stream);
  }
  std::shuffle(busy.begin(), busy.end(), world().random);
  for (FakeStream* stream : busy) {
    if (stream->tasks.front()()) {
      stream->tasks.pop_front();
      return true;
    }
  }
  return false;
}

bool FakeIdle(void* stream) {
  ONE_AT_A_TIME;
  return Stream(stream)->tasks.empty();
}

FakeUnified& fake_unified() {
  static FakeUnified unified;
  return unified;
}
FakeFailures& fake_failures() {
  static FakeFailures instance;
  return instance;
}

FakeLocked& fake_locked() {
  static FakeLocked instance;
  return instance;
}

void FakeSeed(unsigned seed) {
  ONE_AT_A_TIME;
  world().random.seed(seed);
}

size_t FakeRandom(size_t end) {
  ONE_AT_A_TIME;
  return std::uniform_int_distribution<size_t>(0, end - 1)(world().random);
}

const FakeViolations& fake_violations() { return world().violations; }

FakeDevice& fake_device() {
  static FakeDevice instance;
  return instance;
}
std::vector<FakeKernelLaunch>& fake_launches() {
  static std::vector<FakeKernelLaunch> instance;
  return instance;
}
FakeModules& fake_modules() {
  static FakeModules instance;
  return instance;
}

extern "C" {

int cuInit(unsigned) { return 0; }
int cuGetErrorName(int, const char** text) { return *text = "FAKE_ERROR", 0; }
int cuGetErrorString(int, const char** text) { return *text = "an error of the fake driver", 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = &world(), 0; }
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxPushCurrent_v2(void*) { return ++context_depth, 0; }
int cuCtxPopCurrent_v2(void** context) {
  --context_depth;
  return *context = &world(), 0;
}
int cuCtxGetDevice(int* device) { return NeedsContext(), *device = 0, 0; }
int cuStreamGetCtx(void*, void** context) { return *context = &world(), 0; }
int cuStreamCreate(void** stream, unsigned) {
  MAY_FAIL(cuStreamCreate);
  return NeedsContext(), *stream = FakeNewStream(), 0;
}
int cuStreamDestroy_v2(void* stream) {
  ONE_AT_A_TIME;
  return world().streams.erase(Stream(stream)), 0;
}
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  ONE_AT_A_TIME;
  NeedsContext();
  if (fake_failures().stream_wait_event.Due()) return kUnknown;
  if (Mark mark = Event(event)->mark) Stream(stream)->tasks.push_back([mark] { return *mark; });
  return 0;
}
int cuStreamSynchronize(void* stream) {
  ONE_AT_A_TIME;  // or another thread runs what this one is about to
  ++world().violations.host_waits;
  if (fake_failures().stream_synchronize.Due()) return kUnknown;
  while (!FakeIdle(stream)) {
    if (!FakeRunOne()) return kNotReady;
  }
  return 0;
}
int cuCtxSynchronize() {
  NeedsContext();
  while (FakeRunOne()) {
  }
  return 0;
}
int cuEventCreate(void** event, unsigned) { return NeedsContext(), *event = new FakeEvent, 0; }
int cuEventDestroy_v2(void* event) { return delete Event(event), 0; }
int cuEventRecord(void* event, void* stream) {
  NeedsContext();
  if (fake_failures().event_record.Due()) return kUnknown;
  auto mark = std::make_shared<bool>(false);
  auto time = std::make_shared<float>(0);
  Event(event)->mark = mark;
  Event(event)->time = time;
  FakeLaunch(stream, [mark, time] { *mark = true, *time = world().spent; });
  return 0;
}
int cuEventQuery(void* event) { return NeedsContext(), Passed(Event(event)) ? 0 : 600; }
int cuEventSynchronize(void* event) {
  ONE_AT_A_TIME;
  ++world().violations.host_waits;
  while (!Passed(Event(event))) {
    if (!FakeRunOne()) return kNotReady;
  }
  return 0;
}
// What nothing spends time on takes a millisecond.
int cuEventElapsedTime(float* milliseconds, void* begin, void* end) {
  MAY_FAIL(cuEventElapsedTime);
  const auto time = [](void* event) { return Event(event)->time ? *Event(event)->time : 0; };
  *milliseconds = time(end) - time(begin);
  if (*milliseconds == 0) *milliseconds = 1;
  return 0;
}
int cuMemHostAlloc(void** host, size_t bytes, unsigned) {
  ONE_AT_A_TIME;
  return NeedsContext(), ++fake_locked().allocated, *host = std::malloc(bytes), 0;
}
int cuMemFreeHost(void* host) {
  ONE_AT_A_TIME;
  return NeedsContext(), --fake_locked().allocated, std::free(host), 0;
}
int cuMemHostRegister_v2(void*, size_t, unsigned) {
  ONE_AT_A_TIME;
  if (fake_failures().host_register.Due()) return kUnknown;
  return NeedsContext(), ++fake_locked().registered, 0;
}
int cuMemHostUnregister(void*) {
  ONE_AT_A_TIME;
  return NeedsContext(), --fake_locked().registered, 0;
}
int cuMemAlloc_v2(unsigned long long*, size_t) { return 2; }
int cuMemFree_v2(unsigned long long) { return 0; }
int cuMemGetInfo_v2(size_t* free, size_t* total) { return *free = *total = 0, 0; }
int cuMemcpyDtoHAsync_v2(void* host, unsigned long long device, size_t bytes, void* stream) {
  MAY_FAIL(cuMemcpyDtoHAsync_v2);
  NeedsContext();
  FakeLaunch(stream, [=] { std::memcpy(host, reinterpret_cast<void*>(device), bytes); });
  return 0;
}
int cuMemcpyHtoDAsync_v2(unsigned long long device, const void* host, size_t bytes, void* stream) {
  MAY_FAIL(cuMemcpyHtoDAsync_v2);
  NeedsContext();
  FakeLaunch(stream, [=] { std::memcpy(reinterpret_cast<void*>(device), host, bytes); });
  return 0;
}
int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t bytes,
                         void* stream) {
  MAY_FAIL(cuMemcpyDtoDAsync_v2);
  NeedsContext();
  FakeLaunch(stream, [=] {
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  });
  return 0;
}
int cuMemPrefetchAsync(unsigned long long address, size_t bytes, int device, void* stream) {
  NeedsContext();
  FakeLaunch(stream, [=] { fake_unified().migrations.push_back({address, bytes, device}); });
  return 0;
}
int cuPointerGetAttribute(void* value, int, unsigned long long) {
  return *static_cast<unsigned*>(value) = fake_unified().on, 0;
}

int cuMemsetD8Async(unsigned long long device, unsigned char value, size_t bytes, void* stream) {
  NeedsContext();
  FakeLaunch(stream, [=] { std::memset(reinterpret_cast<void*>(device), value, bytes); });
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  const FakeDevice& device = fake_device();
  *value = attribute == 75   ? device.major
           : attribute == 76 ? device.minor
           : attribute == 16 ? device.processors
           : attribute == 97 ? device.shared_bytes
                             : -1;
  return 0;
}

}  // extern "C"
