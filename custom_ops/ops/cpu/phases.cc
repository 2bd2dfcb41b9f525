#include "custom_ops/ops/cpu/phases.h"

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace tfmem {
namespace {

constexpr int kSpins = 1 << 12;   // some 50 us, longer than most shares
constexpr int kYields = 1 << 10;  // then a pool's thread has better things to do

void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#endif
}

// A counter on a separate cache line: one thread writes it, and others poll it.
struct alignas(64) Counter {
  std::atomic<int64_t> value{0};
};

class Phases : public std::enable_shared_from_this<Phases> {
 public:
  Phases(int64_t phases, int shares, int threads, const Schedule& schedule, const ThreadWork& work)
      : phases_(phases),
        shares_(shares),
        threads_(threads),
        schedule_(schedule),
        work_(&work),
        claimed_(shares) {}

  void Run() {
    for (int thread = 1; thread < threads_; ++thread) Invite(thread);
    Participate(0);
  }

 private:
  // A closure that starts late finds all shares claimed, and touches nothing of the caller's.
  void Invite(int thread) {
    schedule_([self = shared_from_this(), thread] { self->Participate(thread); });
  }

  void Participate(int thread) {
    int64_t phase = finished_.value.load(std::memory_order_acquire) / shares_;
    while (phase < phases_) {
      for (int offset = 0; offset < threads_ && offset < shares_; ++offset) {
        for (int share = (thread + offset) % threads_; share < shares_; share += threads_) {
          if (!Claim(phase, share)) continue;
          (*work_)(phase, share, thread);
          finished_.value.fetch_add(1, std::memory_order_acq_rel);
        }
      }
      if (!Await(phase, thread)) return;
      phase = finished_.value.load(std::memory_order_acquire) / shares_;
    }
  }

  bool Claim(int64_t phase, int share) {
    std::atomic<int64_t>& claimed = claimed_[share].value;
    if (claimed.load(std::memory_order_relaxed) != phase) return false;
    return claimed.compare_exchange_strong(phase, phase + 1, std::memory_order_acq_rel);
  }

  // Waits for the shares of `phase`, all of which threads have begun. False: the thread has to
  // leave, and has been scheduled again.
  bool Await(int64_t phase, int thread) {
    const int64_t target = (phase + 1) * shares_;
    for (int64_t turn = 0; finished_.value.load(std::memory_order_acquire) < target; ++turn) {
      if (turn < kSpins) {
        Pause();
      } else if (thread == 0 || turn < kSpins + kYields) {
        std::this_thread::yield();
      } else {
        Invite(thread);
        return false;
      }
    }
    return true;
  }

  const int64_t phases_;
  const int shares_;
  const int threads_;
  const Schedule schedule_;
  const ThreadWork* const work_;  // the caller's: only a thread that claimed a share may use it
  std::vector<Counter> claimed_;  // for each share the phases that some thread has begun
  Counter finished_;              // shares, over all phases
};

}  // namespace

void RunPhases(int64_t phases, int shares, int threads, const Schedule& schedule,
               const Work& work) {
  RunPhases(phases, shares, threads, schedule,
            ThreadWork([&work](int64_t phase, int share, int) { work(phase, share); }));
}

void RunPhases(int64_t phases, int shares, int threads, const Schedule& schedule,
               const ThreadWork& work) {
  if (threads <= 1 || shares <= 1) {
    for (int64_t phase = 0; phase < phases; ++phase) {
      for (int share = 0; share < shares; ++share) work(phase, share, 0);
    }
    return;
  }
  std::make_shared<Phases>(phases, shares, threads, schedule, work)->Run();
}

}  // namespace tfmem
