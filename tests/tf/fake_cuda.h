// What stream_order.cc and recurrent_parts.cc ask of the fake CUDA driver.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

// Threads may call; what runs, runs in one of them at a time.
std::recursive_mutex& fake_mutex();
// Of a call that needs a current context.
void FakeNeedsContext();
// Streams on which something has not run yet.
int FakeBusyStreams();

void* FakeNewStream();
using FakeTasks = std::vector<std::function<void()>>;

// Enqueues a kernel.
void FakeLaunch(void* stream, std::function<void()> kernel);
// What comes after it waits until `ready`.
void FakeLaunchWhen(void* stream, std::function<bool()> ready);
// What is enqueued from now on goes to `captured`; null: no longer.
void FakeCapture(void* stream, FakeTasks* captured);
bool FakeCaptures(void* stream);
// Lets so much time go by on the device, within what is enqueued. Events tell it.
void FakeSpend(float milliseconds);
// Runs the head of a random stream that can go on; false if there is none.
bool FakeRunOne();
extern "C" void FakeSeed(unsigned seed);
// Below `end`.
size_t FakeRandom(size_t end);
// Whether all that was enqueued on it has run.
bool FakeIdle(void* stream);

// Which calls of a function fail: `times` of them after `after` good ones.
struct FakeFailure {
  int after = 0;
  int times = 0;
  int code = 999;  // unknown error

  bool Due() {
    if (times == 0 || after-- > 0) return false;
    return after = 0, times-- > 0;
  }
};
struct FakeFailures {
  FakeFailure event_record;
  FakeFailure stream_wait_event;
  FakeFailure stream_synchronize;
  FakeFailure module_load;  // with "out of memory"
  FakeFailure host_register;
};
FakeFailures& fake_failures();

// Unified memory: whether all of it is, and which pages went where, in the order in which they did.
struct FakeMigration {
  unsigned long long address = 0;
  size_t bytes = 0;
  int device = 0;  // -1: the host
};
// Host memory that is locked: blocks that the driver allocated, and those that it was given.
struct FakeLocked {
  int allocated = 0;
  int registered = 0;
};
FakeLocked& fake_locked();
struct FakeUnified {
  bool on = false;
  std::vector<FakeMigration> migrations;
};
FakeUnified& fake_unified();

// By the function's name, of those that ask: what a call of it fails with, or 0.
int FakeFails(const char* function);
// From Python, too.
extern "C" void fake_fail(const char* function, int after, int times, int code);
extern "C" int fake_calls(const char* function);

struct FakeViolations {
  int no_context = 0;  // calls that need a current context and had none
  int host_waits = 0;  // calls that block the host
};
const FakeViolations& fake_violations();

// What the fake GPU says of itself; tests change it.
struct FakeDevice {
  int major = 9;
  int minor = 0;
  int processors = 132;
  int shared_bytes = 227 << 10;
  int blocks_per_processor = 1;  // of any kernel
  int clusters = 8;              // of any kernel
  size_t parameter_words = 0;    // how many a launch records
};
FakeDevice& fake_device();

// A kernel that was launched; those of fake modules only record that they were.
struct FakeKernelLaunch {
  std::string kernel;
  unsigned blocks = 0;
  unsigned groups = 0;
  unsigned threads = 0;
  unsigned shared_bytes = 0;
  unsigned cluster = 1;
  bool cooperative = false;
  std::vector<uint64_t> words;
};
std::vector<FakeKernelLaunch>& fake_launches();

// A kernel: compiled for the CPU (tests/cuda_on_cpu), or of a fake module, which only records.
struct FakeFunction {
  std::string name;
  const char* (*run)(const void* launch, const void* parameter) = nullptr;
  size_t parameter_bytes = 0;
};
// Launches that ended with an error of a kernel's.
int& fake_kernel_error_count();

struct FakeModules {
  int loaded = 0;
  int unloaded = 0;
  int unloaded_while_busy = 0;  // while a stream had something to run
  int largest_shared = 0;       // that a kernel asked for
  bool large_clusters = false;  // whether a kernel asked for
};
FakeModules& fake_modules();
