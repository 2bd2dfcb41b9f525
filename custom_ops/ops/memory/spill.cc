#include "custom_ops/ops/memory/spill.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <thread>
#include <utility>

#include "custom_ops/ops/memory/faults.h"
#include "custom_ops/ops/memory/spill_file.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

// Runs jobs one after the other, in order. Never destroyed, like TensorFlow's own threads.
class IoThread {
 public:
  IoThread() {
    std::thread([this] { Run(); }).detach();
  }

  void Schedule(std::function<void()> job) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    wake_.notify_one();
  }

 private:
  void Run() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [this] { return !jobs_.empty(); });
      // Moved out of the queue and destroyed before the next wait: an idle thread holds nothing.
      std::function<void()> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> jobs_;
};

// One thread per direction, so that a prefetch never queues behind offloads.
IoThread& Writer() {
  static IoThread* thread = new IoThread;
  return *thread;
}

IoThread& Reader() {
  static IoThread* thread = new IoThread;
  return *thread;
}

}  // namespace

void Completion::Complete(absl::Status status) {
  std::vector<Callback> callbacks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    complete_ = true;
    status_ = status;
    callbacks.swap(callbacks_);
  }
  for (Callback& callback : callbacks) callback(status);
}

void Completion::Then(Callback callback) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!complete_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback(status_);  // never written again once complete
}

// Jobs hold the copy, not the ticket: that the ticket died is how they know the step is over.
struct SpillCopy {
  std::string label;
  SpillOptions options;
  size_t bytes;
  SpillFile file;  // written by the writer before `written` completes, then only read
  Completion written;
  std::atomic<bool> cancelled{false};

  absl::Status Write(const SpillParts& parts) {
    if (bytes == 0) return absl::OkStatus();
    if (cancelled) return absl::CancelledError("the step has ended");
    TFMEM_RETURN_IF_ERROR(CheckFault(Fault::kCopyOut, label));
    TFMEM_ASSIGN_OR_RETURN(file,
                           SpillFile::Acquire(options.directory, bytes, options.budget, label));
    size_t begin = 0;
    for (const SpillPart& part : parts) {
      TFMEM_RETURN_IF_ERROR(
          file.Write(part.data, begin, part.bytes, [this] { return cancelled.load(); }));
      begin += part.bytes;
    }
    counters().bytes_out += bytes;
    return absl::OkStatus();
  }

  absl::Status Read(const SpillParts& parts) {
    if (bytes == 0) return absl::OkStatus();
    if (cancelled) return absl::CancelledError("the step has ended");
    TFMEM_RETURN_IF_ERROR(CheckFault(Fault::kCopyIn, label));
    size_t begin = 0;
    for (const SpillPart& part : parts) {
      TFMEM_RETURN_IF_ERROR(
          file.Read(part.data, begin, part.bytes, [this] { return cancelled.load(); }));
      begin += part.bytes;
    }
    counters().bytes_in += bytes;
    return absl::OkStatus();
  }
};

FileTicket::FileTicket(std::string label, const SpillOptions& options, SpillParts parts,
                       Owner owner)
    : Ticket(std::move(label)), copy_(std::make_shared<SpillCopy>()) {
  copy_->label = this->label();
  copy_->options = options;
  copy_->bytes = 0;
  for (const SpillPart& part : parts) copy_->bytes += part.bytes;
  ++counters().offloads;
  Writer().Schedule([copy = copy_, parts = std::move(parts), owner = std::move(owner)]() mutable {
    absl::Status status = copy->Write(parts);
    owner.reset();  // before the completion: its callbacks may count on the memory being free
    copy->written.Complete(std::move(status));
  });
}

FileTicket::~FileTicket() { copy_->cancelled = true; }

void FileTicket::WhenWritten(Completion::Callback callback) {
  copy_->written.Then(std::move(callback));
}

void FileTicket::StartRead(SpillParts parts, Owner owner) {
  const void* target = parts.empty() ? nullptr : parts.front().data;
  auto completion = std::make_shared<Completion>();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // A second prefetch to the same address means that the first one's tensor is gone.
    auto read = std::find_if(reads_.begin(), reads_.end(),
                             [&](const Read& other) { return other.target == target; });
    if (read == reads_.end()) {
      reads_.push_back({target, completion});
    } else {
      read->completion = completion;
    }
  }
  ++counters().prefetches;
  copy_->written.Then([copy = copy_, parts = std::move(parts), owner = std::move(owner),
                       completion](const absl::Status& written) mutable {
    if (!written.ok()) {
      owner.reset();
      completion->Complete(written);
      return;
    }
    Reader().Schedule([copy = std::move(copy), parts = std::move(parts), owner = std::move(owner),
                       completion]() mutable {
      absl::Status status = copy->Read(parts);
      // Both before Await runs: its output's buffer must have one owner less, and the file must
      // be back in the pool when the ticket dies with it, or the next step would need another
      // one.
      owner.reset();
      copy.reset();
      completion->Complete(std::move(status));
    });
  });
}

void FileTicket::WhenRead(const void* target, Completion::Callback callback) {
  std::shared_ptr<Completion> completion;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Read& read : reads_) {
      if (read.target == target) completion = read.completion;
    }
  }
  if (completion == nullptr) return callback(NotPrefetched());
  completion->Then(std::move(callback));
}

absl::StatusOr<SpillBandwidth> MeasureSpillBandwidth(const SpillOptions& options, size_t bytes) {
  TFMEM_ASSIGN_OR_RETURN(SpillFile file, SpillFile::Acquire(options.directory, bytes,
                                                            options.budget, "bandwidth test"));
  std::vector<char> data(bytes, 1);
  auto rate = [&](auto&& transfer) -> absl::StatusOr<double> {
    const auto start = std::chrono::steady_clock::now();
    TFMEM_RETURN_IF_ERROR(transfer());
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    return bytes / seconds.count();
  };
  const auto never = [] { return false; };
  absl::StatusOr<double> write = rate([&] { return file.Write(data.data(), 0, bytes, never); });
  if (!write.ok()) return write.status();
  absl::StatusOr<double> read = rate([&] { return file.Read(data.data(), 0, bytes, never); });
  if (!read.ok()) return read.status();
  return SpillBandwidth{*write, *read};
}

}  // namespace tfmem
