#include "custom_ops/ops/fusion/variables.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {

namespace core = ::tensorflow::core;
using ::tensorflow::DataTypeString;
using ::tensorflow::ResourceHandle;
using ::tensorflow::Tensor;
using ::tensorflow::Var;

absl::Status RegionVariables::Open() {
  if (uses_.empty()) return absl::OkStatus();
  found_.resize(uses_.size());
  for (size_t i = 0; i < uses_.size(); ++i) {
    TFMEM_RETURN_IF_ERROR(Find(i));
    Var* variable = found_[i].variable.get();
    const bool copied = uses_[i].read && variable->copy_on_read_mode.load();
    if (uses_[i].assigned || (copied && uses_[i].within)) {
      order_.push_back({variable, !uses_[i].assigned});
    }
  }
  const auto by_address = [](const Held& a, const Held& b) {
    return a.variable->mu() < b.variable->mu();
  };
  // Where one variable has two names, the one that is assigned comes first, and stays.
  const auto by_mutex = [&](const Held& a, const Held& b) {
    return a.variable != b.variable ? by_address(a, b) : a.shared < b.shared;
  };
  const auto same_variable = [](const Held& a, const Held& b) { return a.variable == b.variable; };
  std::sort(order_.begin(), order_.end(), by_mutex);
  order_.erase(std::unique(order_.begin(), order_.end(), same_variable), order_.end());
  absl::InlinedVector<Var*, 8> names;
  for (const Entry& found : found_) names.push_back(found.variable.get());
  std::sort(names.begin(), names.end());
  for (Entry& found : found_) {
    const auto same = std::equal_range(names.begin(), names.end(), found.variable.get());
    found.alone = same.second - same.first == 1;
  }
  for (size_t i = 0; i < uses_.size(); ++i) {
    Var* variable = found_[i].variable.get();
    found_[i].locked =
        std::binary_search(order_.begin(), order_.end(), Held{variable, false}, by_address);
    if (!found_[i].locked) TFMEM_RETURN_IF_ERROR(ReadUnlocked(i));
  }
  Lock();
  for (size_t i = 0; i < uses_.size(); ++i) {
    if (uses_[i].read && found_[i].locked) TFMEM_RETURN_IF_ERROR(CheckValue(i));
  }
  return absl::OkStatus();
}

absl::Status RegionVariables::CheckDistinct() const {
  for (size_t i = 0; i < found_.size(); ++i) {
    for (size_t j = i + 1; j < found_.size() && !found_[i].alone; ++j) {
      if (found_[i].variable.get() != found_[j].variable.get()) continue;
      const ResourceHandle& handle = ctx_->input(first_ + i).flat<ResourceHandle>()(0);
      return absl::InvalidArgumentError(
          absl::StrCat("variables[", i, "] and variables[", j, "] of '", ctx_->op_kernel().name(),
                       "' are the same variable, '", handle.name(), "'; expected different ones"));
    }
  }
  return absl::OkStatus();
}

absl::Status RegionVariables::Find(int number) {
  const Tensor& input = ctx_->input(first_ + number);
  const VariableUse& use = uses_[number];
  if (input.dtype() != tensorflow::DT_RESOURCE || input.NumElements() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("variables[", number, "] of '", ctx_->op_kernel().name(), "' is ",
                     DataTypeString(input.dtype()), " of shape ", input.shape().DebugString(),
                     "; expected the handle of one variable"));
  }
  const ResourceHandle& handle = input.flat<ResourceHandle>()(0);
  core::RefCountPtr<Var>* variable = &found_[number].variable;
  const absl::Status status = tensorflow::LookupResource(ctx_, handle, variable);
  if (status.ok()) return status;
  if (use.assigned && !use.read) {
    return tensorflow::LookupOrCreateResource<Var>(ctx_, handle, variable, [&use](Var** made) {
      *made = new Var(use.dtype);
      return absl::OkStatus();
    });
  }
  // As ReadVariableOp says it.
  return absl::FailedPreconditionError(absl::StrCat(
      "Could not find variable ", handle.name(), ". ",
      "This could mean that the variable has been deleted. ",
      "In TF1, it can also mean the variable is uninitialized. ",
      "Debug info: container=", handle.container(), ", status error message=", status.message()));
}

absl::Status RegionVariables::ReadUnlocked(int variable) {
  Entry& found = found_[variable];
  tensorflow::tf_shared_lock lock(*found.variable->mu());
  if (uses_[variable].read) return ReadTensor(variable, &found.value);
  if (found.variable->is_initialized) found.value = *found.variable->tensor();
  return absl::OkStatus();
}

absl::Status RegionVariables::ReadTensor(int variable, Tensor* value) {
  Var* var = found_[variable].variable.get();
  TFMEM_RETURN_IF_ERROR(CheckValue(variable));
  if (var->copy_on_read_mode.load()) return Copy(*var->tensor(), value);
  *value = *var->tensor();
  return absl::OkStatus();
}

absl::Status RegionVariables::CheckValue(int variable) const {
  const Var& var = *found_[variable].variable;
  if (!var.is_initialized) {
    const ResourceHandle& handle = ctx_->input(first_ + variable).flat<ResourceHandle>()(0);
    return absl::FailedPreconditionError(
        absl::StrCat("Attempting to use uninitialized variables: ", handle.name()));
  }
  const tensorflow::DataType found = found_[variable].variable->tensor()->dtype();
  if (found != uses_[variable].dtype) {
    return absl::InvalidArgumentError(
        absl::StrCat("Trying to read variable with wrong dtype. Expected ",
                     DataTypeString(uses_[variable].dtype), " got ", DataTypeString(found)));
  }
  return absl::OkStatus();
}

const Tensor* RegionVariables::Now(int variable) const {
  const Entry& found = found_[variable];
  if (!found.locked) return found.value.dtype() == uses_[variable].dtype ? &found.value : nullptr;
  return found.variable->is_initialized ? found.variable->tensor() : nullptr;
}

absl::Status RegionVariables::Read(int variable, bool while_locked, Tensor* value) {
  Entry& found = found_[variable];
  if (found.locked) {
    if (!while_locked) return ReadTensor(variable, value);
    *value = *found.variable->tensor();
  } else if (!uses_[variable].called) {
    *value = found.value;
  } else {
    // A call before may have changed it. No lock is waited for while one is held.
    Unlock();
    {
      tensorflow::tf_shared_lock lock(*found.variable->mu());
      TFMEM_RETURN_IF_ERROR(ReadTensor(variable, value));
    }
    Lock();
  }
  return absl::OkStatus();
}

bool RegionVariables::MayWrite(int variable) const {
  const Entry& found = found_[variable];
  return !dry_run_ && found.locked && found.alone && found.variable->tensor()->RefCountIsOne();
}

absl::Status RegionVariables::Assign(int variable, Tensor value) {
  if (dry_run_) return absl::OkStatus();
  Var* var = found_[variable].variable.get();
  Tensor* held = var->tensor();
  if (held->dtype() != value.dtype()) {
    return absl::InvalidArgumentError(
        absl::StrCat("Trying to assign variable with wrong dtype. Expected ",
                     DataTypeString(held->dtype()), " got ", DataTypeString(value.dtype())));
  }
  if (var->copy_on_read_mode.load() && !value.SharesBufferWith(*held) && !value.RefCountIsOne()) {
    Tensor copy;
    TFMEM_RETURN_IF_ERROR(Copy(value, &copy));
    value = std::move(copy);
  }
  *held = std::move(value);
  var->is_initialized = true;
  return absl::OkStatus();
}

absl::Status RegionVariables::Copy(const Tensor& from, Tensor* to) {
  TFMEM_RETURN_IF_ERROR(ctx_->allocate_temp(from.dtype(), from.shape(), to));
  if (from.TotalBytes() == 0) return absl::OkStatus();
  if (copy_ != nullptr) return copy_(to->data(), from.data(), from.TotalBytes());
  std::memcpy(to->data(), from.data(), from.TotalBytes());
  return absl::OkStatus();
}

void RegionVariables::Lock() {
  for (const Held& held : order_) {
    held.shared ? held.variable->mu()->lock_shared() : held.variable->mu()->lock();
  }
  locked_ = true;
}

void RegionVariables::Unlock() {
  if (!std::exchange(locked_, false)) return;
  for (const Held& held : order_) {
    held.shared ? held.variable->mu()->unlock_shared() : held.variable->mu()->unlock();
  }
}

}  // namespace tfmem
