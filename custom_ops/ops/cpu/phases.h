// Phases of shares on a thread pool: every share of a phase is done before any of the next begins.
#pragma once

#include <cstdint>
#include <functional>

namespace tfmem {

// Enqueues a closure on a thread pool.
using Schedule = std::function<void(std::function<void()>)>;
// Does one share of one phase.
using Work = std::function<void(int64_t phase, int share)>;
// Work that is told its thread, of 0 to `threads` - 1; no two calls at a time have the same one.
using ThreadWork = std::function<void(int64_t phase, int share, int thread)>;

// Runs phases * shares calls of `work` on the calling thread and on up to `threads` - 1 of a pool.
//
// A share mostly stays with one thread, and so with one core's cache. But any idle thread may take
// it: the calling thread finishes alone if the pool has no thread to give. A pool's thread that
// would wait long goes back to its pool's queue. No thread waits for one that has not begun.
void RunPhases(int64_t phases, int shares, int threads, const Schedule& schedule, const Work& work);
void RunPhases(int64_t phases, int shares, int threads, const Schedule& schedule,
               const ThreadWork& work);

}  // namespace tfmem
