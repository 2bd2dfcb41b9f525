// What an op found for variables, widths and settings that it was given before.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "custom_ops/extension/inline_vector.h"
#include "custom_ops/extension/python.h"

namespace tfmem {

// Addresses of variables, widths of values, settings: an op has each at the same place every time.
using Key = InlineVector<int64_t, 12>;

// What all results for one key share.
struct Entry {
  struct Part {
    Reference measured;
    Py_ssize_t width;
  };

  uint64_t hash = 0;
  std::vector<int64_t> key;
  std::vector<Reference> variables;  // weak references
  std::vector<int64_t> bounds;       // of the integers
  std::vector<Part> parts;           // more than one only of a list
  bool is_list = false;

  // Whether no variable is gone. Another may have the address of one that is.
  bool IsAlive() const {
    for (const Reference& variable : variables) {
      if (PyWeakref_GetObject(variable.get()) == Py_None) return false;
    }
    return true;
  }
};

class Memo {
 public:
  Entry* Find(const Key& key) const {
    if (slots_.empty()) return nullptr;
    const uint64_t hash = Hash(key);
    for (size_t slot = hash >> shift_;; slot = (slot + 1) & (slots_.size() - 1)) {
      Entry* entry = slots_[slot];
      if (entry == nullptr) return nullptr;
      if (entry->hash == hash && IsOf(*entry, key)) return entry->IsAlive() ? entry : nullptr;
    }
  }

  // In place of what is there for its key. What belongs to variables that are gone is forgotten;
  // all is, where it has become too much.
  void Add(const Key& key, std::unique_ptr<Entry> entry);

  int Traverse(visitproc visit, void* arg) const;
  void Clear();

 private:
  static constexpr size_t kMost = 4096;

  static uint64_t Hash(const Key& key) {
    uint64_t hash = key.size();
    for (size_t i = 0; i < key.size(); ++i) {
      hash = (hash ^ static_cast<uint64_t>(key[i])) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 32;
    }
    return hash * 0x9E3779B97F4A7C15u;
  }

  static bool IsOf(const Entry& entry, const Key& key) {
    if (entry.key.size() != key.size()) return false;
    for (size_t i = 0; i < key.size(); ++i) {
      if (entry.key[i] != key[i]) return false;
    }
    return true;
  }

  std::vector<std::unique_ptr<Entry>> entries_;
  std::vector<Entry*> slots_;  // a power of two, at least half of them empty; an entry lies at its
                               // hash or behind it
  int shift_ = 0;              // of a hash, to the number of a slot
};

}  // namespace tfmem
