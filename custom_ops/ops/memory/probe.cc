#include "custom_ops/ops/memory/probe.h"

#include <chrono>
#include <map>
#include <mutex>
#include <utility>

#include "custom_ops/ops/process_wide.h"

namespace tfmem {
namespace {

struct Record {
  ProbeRow row;
  PooledEvent reached;
};

struct Tables {
  std::mutex mutex;
  std::map<int64_t, std::map<int64_t, Record>> runs;
};

// Device time from `from` to `to` in ns; -1 if they are no two events of one GPU.
int64_t Elapsed(const PooledEvent& from, const PooledEvent& to) {
  if (!from || !to || from.link() != to.link()) return -1;
  const cuda::Driver& driver = to.link()->driver();
  cuda::ScopedContext current(driver, to.link()->context());
  float milliseconds = 0;
  if (driver.cuEventSynchronize(from.get()) != cuda::kSuccess ||
      driver.cuEventSynchronize(to.get()) != cuda::kSuccess ||
      driver.cuEventElapsedTime(&milliseconds, from.get(), to.get()) != cuda::kSuccess) {
    return -1;
  }
  return static_cast<int64_t>(milliseconds * 1e6);
}

}  // namespace

void RecordProbe(int64_t run, int64_t index, int64_t bytes_in_use, int64_t peak_bytes,
                 PooledEvent reached) {
  const int64_t now = std::chrono::duration_cast<std::chrono::nanoseconds>(
                          std::chrono::steady_clock::now().time_since_epoch())
                          .count();
  Tables& all = ProcessWide<Tables>();
  std::lock_guard<std::mutex> lock(all.mutex);
  Record& record = all.runs[run][index];
  record.row = {index, now, -1, bytes_in_use, peak_bytes};
  record.reached = std::move(reached);
}

std::vector<ProbeRow> ReadProbes(int64_t run) {
  Tables& all = ProcessWide<Tables>();
  std::lock_guard<std::mutex> lock(all.mutex);
  std::vector<ProbeRow> rows;
  auto found = all.runs.find(run);
  if (found == all.runs.end()) return rows;
  // Times are summed from row to row: single differences keep their precision, which a float of
  // the whole step's milliseconds would lose.
  const PooledEvent* previous = nullptr;
  int64_t device_ns = 0;
  for (const auto& [index, record] : found->second) {
    rows.push_back(record.row);
    if (!record.reached) continue;
    if (previous == nullptr) {
      rows.back().device_ns = 0;
    } else if (const int64_t step = Elapsed(*previous, record.reached); step >= 0) {
      rows.back().device_ns = device_ns += step;
    }
    previous = &record.reached;
  }
  return rows;
}

void ClearProbes(int64_t run) {
  Tables& all = ProcessWide<Tables>();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (run == -1) {
    all.runs.clear();
  } else {
    all.runs.erase(run);
  }
}

}  // namespace tfmem
