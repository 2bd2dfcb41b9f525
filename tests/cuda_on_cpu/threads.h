// CUDA's threads as fibers of one thread of the host: who runs, who waits for whom.
//
// A launch's CTAs run one after the other, or, where they may wait for each other (a cluster, a
// cooperative grid), all together. A fiber runs until it has to wait; then the next one does. Which
// comes first is drawn from a seed, so that what rests on an order fails with some seed, and fails
// with it each time.
#pragma once

#include <csetjmp>
#include <cstdint>
#include <deque>
#include <vector>

namespace on_cpu {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

struct Launch {
  Index grid, block;
  unsigned cluster = 1;  // CTAs of a cluster, along x
  bool cooperative = false;
  unsigned shared = 0;  // bytes of dynamic shared memory of a CTA
  uint64_t seed = 0;
};

// Where threads meet. The generation counts how often they have met.
struct Meeting {
  int members = 0;
  int arrived = 0;
  unsigned generation = 0;
  const char* operation = nullptr;  // at which the first one arrived
  bool vote[2] = {};                // any thread's, by the generation's parity
  bool of_warp = false;             // lanes that poll meet, too, which is no progress
};

// What lanes of a warp tell each other, by the generation's parity: a lane can be one meeting
// ahead of another that has not read yet, and no more.
struct Warp {
  Meeting meeting;
  uint32_t told[2][32][16];
};

struct Cta {
  Index index;
  Meeting meeting;
  Meeting* cluster = nullptr;
  unsigned rank = 0;  // among all that run together
  std::vector<Warp> warps;
};

// 16 bytes on their way to shared memory. Taken when the copy was asked for, put where they belong
// when a thread waits for it: as early and as late as a GPU may.
struct Copy {
  char bytes[16];
  uint32_t to;
};

struct Thread {
  Index index;
  Cta* cta = nullptr;
  Warp* warp = nullptr;
  int lane = 0;
  bool done = false;
  const Meeting* waits_for = nullptr;
  unsigned seen = 0;                     // the generation that it waits to be over
  const char* where = "its first line";  // it waits, or was last seen
  std::vector<Copy> copies;              // of the group that is not ended yet
  std::deque<std::vector<Copy>> groups;
  jmp_buf context;
  bool started = false;
};

extern Thread* current;
extern const Launch* launch;

// Shared memory of the CTAs that run together: each has a window of so many bytes, so that the low
// bits of an address are the place within the CTA's own, as on a GPU.
constexpr uint32_t kWindow = 1 << 18;
char* shared_memory(uint32_t address);
uint32_t address_of(const void* pointer);
char* dynamic_shared();

// Until all members of `meeting` have arrived. `operation` names what they do there; it has to be
// the same for all.
void meet(Meeting& meeting, const char* operation);

// Another thread may go on first: called by a thread that asks for something that is not there.
void poll(const char* where);
// Something that others may be asking for has changed.
void changed();

// Ends the launch with an error.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Runs `kernel(parameter)` in every thread. Returns an empty text or what went wrong.
const char* run(const Launch& launch, void (*kernel)(const void*), const void* parameter);

}  // namespace on_cpu
