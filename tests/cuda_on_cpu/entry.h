// How a kernel of a source that was compiled with ptx_on_cpu.h is called.
#pragma once

#include "threads.h"

namespace on_cpu {

template <class Parameter>
const char* run(const Launch& launch, void (*kernel)(Parameter), const void* words) {
  static void (*called)(Parameter);
  called = kernel;
  return run(
      launch, [](const void* words) { called(*static_cast<const Parameter*>(words)); }, words);
}

template <class Parameter>
constexpr unsigned long bytes_of(void (*)(Parameter)) {
  return sizeof(Parameter);
}

}  // namespace on_cpu

// extern "C" const char* run_NAME(const Launch*, const void* parameter), and how large that is
#define ON_CPU_ENTRY(name)                                                             \
  extern "C" const char* run_##name(const on_cpu::Launch* launch, const void* words) { \
    return on_cpu::run(*launch, &name, words);                                         \
  }                                                                                    \
  extern "C" unsigned long bytes_of_##name() { return on_cpu::bytes_of(&name); }
