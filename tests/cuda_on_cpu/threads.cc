#include "threads.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>

namespace on_cpu {

Thread* current = nullptr;
const Launch* launch = nullptr;

namespace {

constexpr size_t kStack = 256 << 10;
constexpr uint32_t kUnwritten = 0x7fea0000;  // a quiet NaN; below it the word that no thread wrote
constexpr long kPollsOfAThread = 20000;      // in vain, all threads', before it is a hang

jmp_buf scheduler;
ucontext_t origin;
std::string error;
void (*entry)(const void*);
const void* argument;
long polls_in_vain;
char* arena;
size_t arena_size;

// Stacks of fibers, kept from launch to launch.
char* stack(size_t index) {
  static std::vector<char*> stacks;
  while (stacks.size() <= index) {
    void* memory = mmap(nullptr, kStack, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fail("no memory for the stack of thread %zu", index);
    stacks.push_back(static_cast<char*>(memory));
  }
  return stacks[index];
}

void release(Meeting& meeting) {
  meeting.arrived = 0;
  meeting.operation = nullptr;
  ++meeting.generation;
  meeting.vote[meeting.generation % 2] = false;
  if (!meeting.of_warp) changed();
}

void leave(Meeting& meeting) {
  --meeting.members;
  if (meeting.members > 0 && meeting.arrived == meeting.members) release(meeting);
}

void body() {
  entry(argument);
  Thread& thread = *current;
  thread.done = true;
  leave(thread.cta->meeting);
  if (thread.cta->cluster != nullptr) leave(*thread.cta->cluster);
  changed();
  _longjmp(scheduler, 1);
}

void resume(Thread& thread, size_t index) {
  current = &thread;
  if (_setjmp(scheduler) != 0) return;
  if (thread.started) _longjmp(thread.context, 1);
  thread.started = true;
  ucontext_t fiber;
  getcontext(&fiber);
  fiber.uc_stack.ss_sp = stack(index);
  fiber.uc_stack.ss_size = kStack;
  fiber.uc_link = nullptr;
  makecontext(&fiber, body, 0);
  swapcontext(&origin, &fiber);
}

void yield() {
  if (_setjmp(current->context) == 0) _longjmp(scheduler, 1);
}

// Who waits where, in words.
std::string state_of(const std::vector<Thread>& threads) {
  std::map<std::string, int> waiting;
  for (const Thread& thread : threads) {
    if (!thread.done) {
      char cta[64];
      snprintf(cta, sizeof(cta), "CTA (%u, %u)", thread.cta->index.x, thread.cta->index.y);
      ++waiting[std::string(cta) + " at " + thread.where];
    }
  }
  std::string text;
  int lines = 0;
  for (const auto& [where, count] : waiting) {
    if (++lines > 12) return text + "; and more";
    text += (lines > 1 ? "; " : "") + std::to_string(count) + " threads of " + where;
  }
  return text;
}

void poison(char* memory, size_t bytes) {
  for (uint32_t word = 0; word < bytes / 4; ++word) {
    const uint32_t value = kUnwritten | word;
    memcpy(memory + word * 4, &value, 4);
  }
}

// CTAs that run together.
void run_together(std::vector<Cta>& ctas, std::mt19937_64& random) {
  const size_t size = ctas.size() * kWindow;
  if (arena_size < size) {
    if (arena != nullptr) munmap(arena, arena_size);
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fail("no memory for the shared memory of %zu CTAs", ctas.size());
    arena = static_cast<char*>(memory);
    arena_size = size;
  }
  const int block = launch->block.x;
  std::vector<std::unique_ptr<Meeting>> clusters;
  std::vector<Thread> threads(ctas.size() * block);
  for (size_t c = 0; c < ctas.size(); ++c) {
    Cta& cta = ctas[c];
    cta.rank = c;
    cta.meeting.members = block;
    cta.warps.resize((block + 31) / 32);
    poison(arena + c * kWindow, launch->shared);
    if (launch->cluster > 1) {
      if (c % launch->cluster == 0) {
        clusters.push_back(std::make_unique<Meeting>());
        clusters.back()->members = launch->cluster * block;
      }
      cta.cluster = clusters.back().get();
    }
    for (int t = 0; t < block; ++t) {
      Thread& thread = threads[c * block + t];
      thread.index.x = t;
      thread.cta = &cta;
      thread.warp = &cta.warps[t / 32];
      thread.lane = t % 32;
      ++thread.warp->meeting.members;
      thread.warp->meeting.of_warp = true;
    }
  }
  std::vector<size_t> order(threads.size());
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  polls_in_vain = 0;
  const long most_polls = kPollsOfAThread * static_cast<long>(threads.size());
  size_t left = threads.size();
  while (left > 0) {
    bool ran = false;
    for (const size_t index : order) {
      Thread& thread = threads[index];
      if (thread.done) continue;
      if (thread.waits_for != nullptr && thread.waits_for->generation == thread.seen) continue;
      thread.waits_for = nullptr;
      ran = true;
      resume(thread, index);
      if (!error.empty()) return;
      if (thread.done) --left;
    }
    if (!ran) error = "a barrier that hangs: " + state_of(threads);
    if (polls_in_vain > most_polls) error = "polls for what never comes: " + state_of(threads);
    if (!error.empty()) return;
  }
}

}  // namespace

char* shared_memory(uint32_t address) {
  if (address >= arena_size || address % kWindow >= launch->shared) {
    fail("%u is no place in the %u bytes of shared memory (CTA %u)", address % kWindow,
         launch->shared, address / kWindow);
  }
  return arena + address;
}

uint32_t address_of(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - arena);
}

char* dynamic_shared() { return arena + size_t{current->cta->rank} * kWindow; }

void meet(Meeting& meeting, const char* operation) {
  if (meeting.operation == nullptr) meeting.operation = operation;
  if (strcmp(meeting.operation, operation) != 0) {
    fail("threads that have to meet are at different operations: %s, and thread %u at %s",
         meeting.operation, current->index.x, operation);
  }
  current->where = operation;
  if (++meeting.arrived == meeting.members) {
    release(meeting);
    return;
  }
  current->waits_for = &meeting;
  current->seen = meeting.generation;
  yield();
}

void poll(const char* where) {
  ++polls_in_vain;
  current->where = where;
  yield();
}

void changed() { polls_in_vain = 0; }

void fail(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  error = text;
  _longjmp(scheduler, 1);
}

const char* run(const Launch& given, void (*kernel)(const void*), const void* parameter) {
  launch = &given;
  entry = kernel;
  argument = parameter;
  error.clear();
  std::mt19937_64 random(given.seed);
  std::vector<Cta> all(given.grid.x * given.grid.y);
  for (size_t i = 0; i < all.size(); ++i) {
    all[i].index.x = i % given.grid.x;
    all[i].index.y = i / given.grid.x;
  }
  const size_t together = given.cooperative ? all.size() : given.cluster;
  for (size_t first = 0; first < all.size() && error.empty(); first += together) {
    std::vector<Cta> ctas(all.begin() + first,
                          all.begin() + std::min(first + together, all.size()));
    run_together(ctas, random);
  }
  current = nullptr;
  return error.c_str();
}

}  // namespace on_cpu
