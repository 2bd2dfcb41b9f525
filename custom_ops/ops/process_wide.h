// State that the whole process has one of.
#ifndef TFMEM_CUSTOM_OPS_OPS_PROCESS_WIDE_H_
#define TFMEM_CUSTOM_OPS_OPS_PROCESS_WIDE_H_

namespace tfmem {

// The process's T, made at the first call. Never destroyed: TensorFlow's threads and the tickets of
// the last step may outlive static destructors.
template <typename T>
T& ProcessWide() {
  static T* instance = new T;
  return *instance;
}

}  // namespace tfmem

#endif  // TFMEM_CUSTOM_OPS_OPS_PROCESS_WIDE_H_
