// Variables of a region while it runs: found, locked, read and assigned as TensorFlow's own ops do.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace tfmem {

// What a region does with a variable.
struct VariableUse {
  tensorflow::DataType dtype = tensorflow::DT_FLOAT;
  bool read = false;  // before it is assigned
  bool assigned = false;
  bool called = false;  // by a call, whose kernel takes the lock itself
  bool within = false;  // what is read of it is needed only while the variable is locked
};

using CopyBytes = std::function<absl::Status(void* to, const void* from, int64_t bytes)>;

// The variables that a region assigns are locked exclusively as long as it runs, in the order of
// their mutexes' addresses, as TensorFlow's updates lock theirs: a step's reading, computing and
// writing is one. The others are read before, so that no lock is waited for while one is held; but
// where memory must not be shared and reading would copy it, as after sparse updates, a variable is
// locked with those, for readers, if that is long enough. All are unlocked only while a call runs
// that locks variables itself.
class RegionVariables {
 public:
  // Variable i of the region is input `first` + i of the op.
  // `copy` copies bytes to memory of the op's device; without one, by the processor.
  // `dry_run`: what is assigned is dropped, and every variable stays as it is.
  RegionVariables(tensorflow::OpKernelContext* ctx, int first, absl::Span<const VariableUse> uses,
                  CopyBytes copy = nullptr, bool dry_run = false)
      : ctx_(ctx), first_(first), uses_(uses), copy_(std::move(copy)), dry_run_(dry_run) {}
  ~RegionVariables() { Unlock(); }

  // Finds, reads and locks. FailedPrecondition with TensorFlow's words if a variable that is read
  // has no value; InvalidArgument if it has another dtype.
  absl::Status Open();
  // Behind Open: InvalidArgument if two are the same variable, which an op cannot take that writes
  // the memory of each. A region can: it goes by `MayWrite` and `Now` each time.
  absl::Status CheckDistinct() const;

  // The variable itself; two names of one have the same.
  const tensorflow::Var* Found(int variable) const { return found_[variable].variable.get(); }
  // What the variable has now; null if it has no value, which only one that is not read may not.
  const tensorflow::Tensor* Now(int variable) const;
  // Gives the value to a caller that holds it: a copy if the variable's memory must not be shared,
  // unless the caller holds it only as long as the variable is locked.
  absl::Status Read(int variable, bool while_locked, tensorflow::Tensor* value);
  // Whether its buffer may be written: it is locked, has no other name, and no other reference.
  bool MayWrite(int variable) const;
  // The variable takes `value` and its memory; where that must not be shared and has another
  // reference, it takes a copy.
  absl::Status Assign(int variable, tensorflow::Tensor value);

  void Unlock();
  void Lock();

 private:
  absl::Status Find(int variable);
  absl::Status ReadUnlocked(int variable);
  absl::Status CheckValue(int variable) const;
  absl::Status ReadTensor(int variable, tensorflow::Tensor* value);
  absl::Status Copy(const tensorflow::Tensor& from, tensorflow::Tensor* to);

  tensorflow::OpKernelContext* const ctx_;
  const int first_;
  const absl::Span<const VariableUse> uses_;
  const CopyBytes copy_;
  const bool dry_run_;
  struct Entry {
    tensorflow::core::RefCountPtr<tensorflow::Var> variable;
    bool locked = false;       // as it, or another name of it, is in order_
    bool alone = true;         // it has no other name
    tensorflow::Tensor value;  // unless it is locked
  };
  absl::InlinedVector<Entry, 8> found_;
  struct Held {
    tensorflow::Var* variable;
    bool shared;  // locked for readers
  };
  absl::InlinedVector<Held, 8> order_;  // in which they are locked
  bool locked_ = false;
};

}  // namespace tfmem
