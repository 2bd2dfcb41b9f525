// What a MemOp handle refers to: what was moved out of device memory.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "custom_ops/ops/counters.h"

namespace tfmem {

// Keeps a TensorFlow buffer alive; the mechanisms know nothing else about tensors.
using Owner = std::shared_ptr<void>;

// Leaks a reference: a copy may touch the buffer, and no event tells when that ends.
inline void Abandon(Owner owner) { new Owner(std::move(owner)); }

// What moves as one: a tensor, or those of lists. Reference counted by the variant handles that
// name it, so it dies with the step, also when the step is aborted. A destructor may run on any
// thread and must leave every buffer that a copy still touches safe to reuse.
class Ticket {
 public:
  explicit Ticket(std::string label) : label_(std::move(label)) {}
  virtual ~Ticket() = default;
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  const std::string& label() const { return label_; }
  absl::Status NotPrefetched() const {
    return absl::InvalidArgumentError(
        absl::StrCat("the awaited tensor is not one that was prefetched from '", label_, "'"));
  }

 private:
  const std::string label_;
};

// Counts what a mechanism moves, as long as it lives.
class LiveTicket {
 public:
  LiveTicket() { ++counters().live_tickets; }
  ~LiveTicket() { --counters().live_tickets; }
  LiveTicket(const LiveTicket&) = delete;
  LiveTicket& operator=(const LiveTicket&) = delete;
};

}  // namespace tfmem
