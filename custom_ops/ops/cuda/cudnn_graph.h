// Descriptors of cuDNN's graph API.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "custom_ops/ops/cuda/cudnn.h"

namespace tfmem {

// An attribute's name, type and values, which belong to the caller.
struct CudnnAttribute {
  int name;
  cudnn::AttributeType type;
  int64_t count;
  const void* values;
};

inline CudnnAttribute CudnnIntegers(int name, absl::Span<const int64_t> values) {
  return {name, cudnn::kInt64Type, static_cast<int64_t>(values.size()), values.data()};
}

template <typename T>
CudnnAttribute CudnnValue(int name, cudnn::AttributeType type, const T& value) {
  return {name, type, 1, &value};
}

class CudnnDescriptor {
 public:
  // Sets the attributes and finalizes the descriptor. What it refers to has to stay.
  static absl::StatusOr<CudnnDescriptor> Make(const cudnn::Library& library, cudnn::Kind kind,
                                              std::initializer_list<CudnnAttribute> attributes);

  // How many values an attribute has.
  absl::StatusOr<int64_t> Count(int attribute, cudnn::AttributeType type) const;
  // So many descriptors that an attribute has, each of them `kind`, or fewer.
  absl::StatusOr<std::vector<CudnnDescriptor>> Parts(int attribute, cudnn::Kind kind,
                                                     int64_t count) const;
  // The values that an attribute has, at most `most`.
  template <typename T>
  absl::StatusOr<std::vector<T>> Values(int attribute, cudnn::AttributeType type,
                                        int64_t most) const {
    std::vector<T> values(most);
    int64_t count = 0;
    const absl::Status status = Get(attribute, type, most, &count, values.data());
    if (!status.ok()) return status;
    values.resize(std::min(count, most));
    return values;
  }

  CudnnAttribute As(int attribute) const {
    return CudnnValue(attribute, cudnn::kDescriptorType, descriptor_);
  }
  cudnn::Descriptor get() const { return descriptor_; }

  CudnnDescriptor(CudnnDescriptor&& other) noexcept
      : library_(other.library_), descriptor_(std::exchange(other.descriptor_, nullptr)) {}
  CudnnDescriptor& operator=(CudnnDescriptor&& other) noexcept {
    std::swap(library_, other.library_);
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~CudnnDescriptor() {
    if (descriptor_ != nullptr) library_->cudnnBackendDestroyDescriptor(descriptor_);
  }

 private:
  explicit CudnnDescriptor(const cudnn::Library& library) : library_(&library) {}
  static absl::StatusOr<CudnnDescriptor> Open(const cudnn::Library& library, cudnn::Kind kind);
  absl::Status Get(int attribute, cudnn::AttributeType type, int64_t most, int64_t* count,
                   void* values) const;

  const cudnn::Library* library_;
  cudnn::Descriptor descriptor_ = nullptr;
};

}  // namespace tfmem
