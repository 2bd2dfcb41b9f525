#include "custom_ops/ops/memory/faults.h"

#include <array>
#include <atomic>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/process_wide.h"

namespace tfmem {
namespace {

constexpr const char* kFaultNames[kFaultKinds] = {"copy_out", "copy_in", "allocate"};

struct Plan {
  int64_t after = 0;
  int64_t times = 0;
};

struct Plans {
  std::atomic<bool> armed{false};  // keeps the mutex off the path of every normal copy
  std::mutex mutex;
  std::array<Plan, kFaultKinds> plans;
};

}  // namespace

void InjectFault(Fault kind, int64_t after, int64_t times) {
  Plans& all = ProcessWide<Plans>();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.plans[static_cast<int>(kind)] = {after, times};
  bool armed = false;
  for (const Plan& plan : all.plans) armed |= plan.times > 0;
  all.armed = armed;
}

absl::Status CheckFault(Fault kind, const std::string& label) {
  Plans& all = ProcessWide<Plans>();
  if (!all.armed.load(std::memory_order_relaxed)) return absl::OkStatus();
  std::lock_guard<std::mutex> lock(all.mutex);
  Plan& plan = all.plans[static_cast<int>(kind)];
  if (plan.times == 0) return absl::OkStatus();
  if (plan.after > 0) {
    --plan.after;
    return absl::OkStatus();
  }
  --plan.times;
  return absl::InternalError(
      absl::StrCat("injected fault: ", kFaultNames[static_cast<int>(kind)], " of '", label, "'"));
}

}  // namespace tfmem
