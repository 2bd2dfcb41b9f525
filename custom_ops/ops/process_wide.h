// State that the whole process has one of.
#pragma once

namespace tfmem {

// The process's T, made at the first call. Never destroyed: TensorFlow's threads and the tickets of
// the last step may outlive static destructors.
template <typename T>
T& ProcessWide() {
  static T* instance = new T;
  return *instance;
}

}  // namespace tfmem
