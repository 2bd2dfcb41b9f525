// A vector of plain numbers or pointers, whose first few elements need no allocation.

#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>

namespace tfmem {

template <typename T, size_t kInline>
class InlineVector {
  static_assert(std::is_trivial_v<T>);

 public:
  InlineVector() {}
  InlineVector(const InlineVector&) = delete;
  InlineVector& operator=(const InlineVector&) = delete;

  void push_back(T value) {
    if (size_ == capacity_) Grow();
    data_[size_++] = value;
  }
  void clear() { size_ = 0; }

  size_t size() const { return size_; }
  const T* data() const { return data_; }
  T operator[](size_t i) const { return data_[i]; }

 private:
  void Grow() {
    std::unique_ptr<T[]> larger(new T[capacity_ * 2]);
    std::copy(data_, data_ + size_, larger.get());
    heap_ = std::move(larger);
    data_ = heap_.get();
    capacity_ *= 2;
  }

  size_t size_ = 0;
  size_t capacity_ = kInline;
  T* data_ = first_;
  std::unique_ptr<T[]> heap_;
  T first_[kInline];
};

}  // namespace tfmem
