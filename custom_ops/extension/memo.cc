#include "custom_ops/extension/memo.h"

#include <utility>

namespace tfmem {

void Memo::Add(const Key& key, std::unique_ptr<Entry> entry) {
  entry->hash = Hash(key);
  entry->key.assign(key.data(), key.data() + key.size());
  slots_.clear();
  // What is forgotten is given back last: that may run Python code, which may come here again.
  std::vector<std::unique_ptr<Entry>> forgotten;
  if (entries_.size() >= kMost) forgotten.swap(entries_);
  const auto kept = std::stable_partition(
      entries_.begin(), entries_.end(), [&](const std::unique_ptr<Entry>& known) {
        return known->IsAlive() && !(known->hash == entry->hash && IsOf(*known, key));
      });
  forgotten.insert(forgotten.end(), std::make_move_iterator(kept),
                   std::make_move_iterator(entries_.end()));
  entries_.erase(kept, entries_.end());
  entries_.push_back(std::move(entry));

  int bits = 3;
  while ((size_t{1} << bits) < 2 * entries_.size()) ++bits;
  shift_ = 64 - bits;
  slots_.assign(size_t{1} << bits, nullptr);
  for (const std::unique_ptr<Entry>& known : entries_) {
    size_t slot = known->hash >> shift_;
    while (slots_[slot] != nullptr) slot = (slot + 1) & (slots_.size() - 1);
    slots_[slot] = known.get();
  }
}

int Memo::Traverse(visitproc visit, void* arg) const {
  for (const std::unique_ptr<Entry>& entry : entries_) {
    for (const Reference& variable : entry->variables) Py_VISIT(variable.get());
    for (const Entry::Part& part : entry->parts) Py_VISIT(part.measured.get());
  }
  return 0;
}

void Memo::Clear() {
  slots_.clear();
  std::vector<std::unique_ptr<Entry>> forgotten;
  forgotten.swap(entries_);
}

}  // namespace tfmem
