// How MemOps move tensors to files, on the CPU.
#pragma once

#include <chrono>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "custom_ops/ops/counters.h"
#include "custom_ops/ops/memory/spill.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {

// How an op moves tensors to a file, by its attributes.
class FileMechanism {
 public:
  absl::Status Read(tensorflow::OpKernelConstruction* ctx);

  const std::string& label() const { return label_; }
  const SpillOptions& options() const { return options_; }

 private:
  std::string label_;
  SpillOptions options_;
};

// Finishes an asynchronous kernel when the I/O thread says so, and counts what it waited.
class Finish {
 public:
  Finish(tensorflow::OpKernelContext* ctx, tensorflow::AsyncOpKernel::DoneCallback done)
      : ctx_(ctx), done_(std::move(done)), start_(std::chrono::steady_clock::now()) {}

  void operator()(const absl::Status& status) const {
    const std::chrono::nanoseconds waited = std::chrono::steady_clock::now() - start_;
    counters().stall_ns += waited.count();
    if (!status.ok()) ctx_->SetStatus(status);
    done_();
  }

 private:
  tensorflow::OpKernelContext* const ctx_;
  const tensorflow::AsyncOpKernel::DoneCallback done_;
  const std::chrono::steady_clock::time_point start_;
};

}  // namespace tfmem
