#include "custom_ops/ops/memory/file_mechanism.h"

#include <atomic>
#include <cstdint>
#include <optional>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/memory/spill_directories.h"
#include "custom_ops/ops/status_macros.h"
#include "tensorflow/core/platform/logging.h"

namespace tfmem {

absl::Status FileMechanism::Read(tensorflow::OpKernelConstruction* ctx) {
  const std::string& name = ctx->def().name();
  std::string mechanism, key;
  int64_t budget = 0;
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("mechanism", &mechanism));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("label", &label_));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("spill_key", &key));
  TFMEM_RETURN_IF_ERROR(ctx->GetAttr("spill_budget", &budget));
  static std::atomic<bool> said_unknown{false};
  const std::optional<std::string> directory = FindSpillDirectory(key);
  if (!directory && !said_unknown.exchange(true)) {
    LOG(WARNING) << "the spill directory of '" << name << "' (" << ctx->def().op()
                 << ") was chosen in another process; here its files go to the system's "
                 << "directory for temporary files (TMPDIR)";
  }
  options_.directory = directory.value_or("");
  options_.budget = budget;
  if (label_.empty()) label_ = name;
  if (mechanism == "auto" || mechanism == "file") return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("mechanism \"", mechanism, "\" of '", name,
                   "' needs a GPU; on the CPU use \"file\" or \"auto\""));
}

}  // namespace tfmem
