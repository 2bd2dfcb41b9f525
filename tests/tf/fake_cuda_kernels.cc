// The fake CUDA driver's modules and launches of kernels.
#include <dlfcn.h>

#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../cuda_on_cpu/threads.h"
#include "fake_cuda.h"

namespace {

constexpr int kOutOfMemory = 2;
constexpr int kUnknown = 999;

}  // namespace

// As in cuda.h.
struct FakeAttribute {
  unsigned id;
  unsigned padding;
  unsigned value[16];
};
struct FakeConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void* stream;
  const FakeAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(FakeAttribute) == 72 && sizeof(FakeConfig) == 56, "as in cuda.h");

extern "C" {

int cuModuleLoadData(void** module, const void* image) {
  const std::lock_guard<std::recursive_mutex> lock(fake_mutex());
  if (const int code = FakeFails("cuModuleLoadData")) return code;
  if (fake_failures().module_load.Due()) return kOutOfMemory;
  ++fake_modules().loaded;
  return FakeNeedsContext(), *module = new std::string(static_cast<const char*>(image)), 0;
}
int cuModuleUnload(void* module) {
  const std::lock_guard<std::recursive_mutex> lock(fake_mutex());
  ++fake_modules().unloaded;
  fake_modules().unloaded_while_busy += FakeBusyStreams();
  return FakeNeedsContext(), delete static_cast<std::string*>(module), 0;
}
// The functions of a module whose image is a path are those of a shared object.
int cuModuleGetFunction(void** function, void* module, const char* name) {
  const std::lock_guard<std::recursive_mutex> lock(fake_mutex());
  if (const int code = FakeFails("cuModuleGetFunction")) return code;
  static std::map<std::pair<std::string, std::string>, FakeFunction> functions;
  const std::string& image = *static_cast<std::string*>(module);
  FakeFunction& found = functions[{image[0] == '/' ? image : "", name}];
  found.name = name;
  *function = &found;
  if (image[0] != '/') return 0;
  void* library = dlopen(image.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), kUnknown;
  found.run = reinterpret_cast<decltype(found.run)>(dlsym(library, ("run_" + found.name).c_str()));
  const auto bytes =
      reinterpret_cast<size_t (*)()>(dlsym(library, ("bytes_of_" + found.name).c_str()));
  if (found.run == nullptr || bytes == nullptr) return kUnknown;
  found.parameter_bytes = bytes();
  return 0;
}
int cuFuncSetAttribute(void*, int attribute, int value) {
  if (attribute == 8) fake_modules().largest_shared = value;
  if (attribute == 14) fake_modules().large_clusters = value != 0;
  return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int, size_t) {
  if (const int code = FakeFails("cuOccupancyMaxActiveBlocksPerMultiprocessor")) return code;
  return *blocks = fake_device().blocks_per_processor, 0;
}
int cuOccupancyMaxActiveClusters(int* clusters, void*, const FakeConfig*) {
  return *clusters = fake_device().clusters, 0;
}
int cuLaunchKernelEx(const FakeConfig* config, void* function, void** parameters, void**) {
  if (const int code = FakeFails("cuLaunchKernelEx")) return code;
  FakeNeedsContext();
  FakeKernelLaunch launch;
  launch.kernel = static_cast<FakeFunction*>(function)->name;
  launch.blocks = config->grid[0];
  launch.groups = config->grid[1];
  launch.threads = config->block[0];
  launch.shared_bytes = config->shared_bytes;
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    const FakeAttribute& attribute = config->attributes[i];
    if (attribute.id == 4) launch.cluster = attribute.value[0];
    if (attribute.id == 2) launch.cooperative = attribute.value[0] == 1;
  }
  const auto* words = static_cast<const uint64_t*>(parameters[0]);
  launch.words.assign(words, words + fake_device().parameter_words);
  const auto& called = *static_cast<FakeFunction*>(function);
  const char* bytes = static_cast<const char*>(parameters[0]);
  std::vector<char> parameter(bytes, bytes + called.parameter_bytes);
  FakeLaunch(config->stream, [launch, &called, parameter] {
    fake_launches().push_back(launch);
    if (called.run == nullptr) return;
    on_cpu::Launch on_cpu;
    on_cpu.grid = {launch.blocks, launch.groups, 1};
    on_cpu.block = {launch.threads, 1, 1};
    on_cpu.cluster = launch.cluster;
    on_cpu.cooperative = launch.cooperative;
    on_cpu.shared = launch.shared_bytes;
    on_cpu.seed = 1;
    const std::string error = called.run(&on_cpu, parameter.data());
    if (error.empty()) return;
    std::fprintf(stderr, "%s: %s\n", called.name.c_str(), error.c_str());
    ++fake_kernel_error_count();
  });
  return 0;
}

}  // extern "C"
