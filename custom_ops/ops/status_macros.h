// Passing a failure on to the caller, in functions that return a status or a value or a status.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Returns the status of `expression`, an absl::Status, unless it is OK.
#define TFMEM_RETURN_IF_ERROR(...)                                                          \
  do {                                                                                      \
    if (absl::Status tfmem_status = (__VA_ARGS__); !tfmem_status.ok()) return tfmem_status; \
  } while (false)

// TFMEM_ASSIGN_OR_RETURN(int64_t size, SizeOf(file)): declares or assigns the value of an
// absl::StatusOr, or returns its status.
#define TFMEM_ASSIGN_OR_RETURN(target, ...) \
  TFMEM_ASSIGN_OR_RETURN_(TFMEM_JOIN(tfmem_result_, __COUNTER__), target, __VA_ARGS__)
#define TFMEM_ASSIGN_OR_RETURN_(result, target, ...) \
  auto result = (__VA_ARGS__);                       \
  if (!result.ok()) return result.status();          \
  target = *std::move(result)

#define TFMEM_JOIN(a, b) TFMEM_JOIN_(a, b)
#define TFMEM_JOIN_(a, b) a##b
