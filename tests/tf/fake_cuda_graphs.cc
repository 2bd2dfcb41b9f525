// The fake CUDA driver's graphs. A launch runs what its graph holds at that time, one launch of a
// graph after the other; its nodes in a random order that their dependences allow, what a child
// graph holds in its order, with other nodes in between.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "../cuda_on_cpu/threads.h"
#include "fake_cuda.h"

namespace {

constexpr int kInvalidValue = 1;
constexpr int kUpdateFailed = 910;
constexpr int kCaptureWrong = 901;

// As in cuda.h.
struct KernelParameters {
  FakeFunction* function;
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void** parameters;
  void** extra;
  void* kernel;
  void* context;
};
struct MemsetParameters {
  unsigned long long to;
  size_t pitch;
  unsigned value;
  unsigned element_bytes;
  size_t width;
  size_t height;
};
static_assert(sizeof(KernelParameters) == 72 && sizeof(MemsetParameters) == 40, "as in cuda.h");

struct Node {
  FakeTasks tasks;
  std::vector<const Node*> before;
  bool kernel = false;
  bool child = false;
  bool cooperative = false;
  KernelParameters launch = {};
  std::vector<char> parameter;
};

struct FakeGraph {
  std::vector<std::unique_ptr<Node>> nodes;
};

struct FakeExec {
  std::vector<std::pair<const Node*, Node>> nodes;
  std::shared_ptr<bool> ended = std::make_shared<bool>(true);  // the launch before

  Node* Find(const Node* node) {
    for (auto& [key, content] : nodes) {
      if (key == node) return &content;
    }
    return nullptr;
  }
};

std::map<void*, FakeGraph*> captures;  // by stream
std::atomic<int> live_graphs{0};
std::atomic<int> live_execs{0};

void RunKernel(const Node& node) {
  on_cpu::Launch launch;
  launch.grid = {node.launch.grid[0], node.launch.grid[1], node.launch.grid[2]};
  launch.block = {node.launch.block[0], node.launch.block[1], node.launch.block[2]};
  launch.cooperative = node.cooperative;
  launch.shared = node.launch.shared_bytes;
  launch.seed = 1;
  const std::string error = node.launch.function->run(&launch, node.parameter.data());
  if (error.empty()) return;
  std::fprintf(stderr, "%s: %s\n", node.launch.function->name.c_str(), error.c_str());
  ++fake_kernel_error_count();
}

void SetKernel(const KernelParameters& parameters, Node* node) {
  node->kernel = true;
  node->launch = parameters;
  const char* bytes = static_cast<const char*>(parameters.parameters[0]);
  node->parameter.assign(bytes, bytes + parameters.function->parameter_bytes);
}

void SetMemset(const MemsetParameters& parameters, Node* node) {
  node->tasks = {[parameters] {
    std::memset(reinterpret_cast<void*>(parameters.to), parameters.value, parameters.width);
  }};
}

// Null if there are others than nodes of the graph, or one of them twice.
Node* NewNode(FakeGraph* graph, Node* const* before = nullptr, size_t count = 0) {
  std::set<const Node*> there;
  for (const auto& node : graph->nodes) there.insert(node.get());
  for (size_t i = 0; i < count; ++i) {
    if (there.erase(before[i]) == 0) return nullptr;
  }
  Node* node = graph->nodes.emplace_back(std::make_unique<Node>()).get();
  node->before.assign(before, before + count);
  return node;
}

// All that the nodes run, in an order that they allow.
FakeTasks InSomeOrder(const FakeExec& exec) {
  FakeTasks order;
  std::set<const Node*> ended;
  auto pending = exec.nodes;
  for (auto& [key, node] : pending) {
    if (node.kernel) node.tasks = {[node = node] { RunKernel(node); }};
  }
  while (!pending.empty()) {
    std::vector<size_t> ready;
    for (size_t i = 0; i < pending.size(); ++i) {
      const std::vector<const Node*>& before = pending[i].second.before;
      if (std::all_of(before.begin(), before.end(),
                      [&](const Node* node) { return ended.count(node) > 0; })) {
        ready.push_back(i);
      }
    }
    const size_t next = ready[FakeRandom(ready.size())];
    auto& [key, node] = pending[next];
    if (!node.tasks.empty()) {
      order.push_back(std::move(node.tasks.front()));
      node.tasks.erase(node.tasks.begin());
    }
    if (!node.tasks.empty()) continue;
    ended.insert(key);
    pending.erase(pending.begin() + next);
  }
  return order;
}

FakeTasks TasksOf(const FakeGraph& graph) {
  FakeTasks tasks;
  for (const auto& node : graph.nodes) {
    tasks.insert(tasks.end(), node->tasks.begin(), node->tasks.end());
  }
  return tasks;
}

}  // namespace

#define MAY_FAIL(name) \
  if (const int code = FakeFails(#name)) return code

extern "C" {

int fake_live_graphs(void) { return live_graphs; }
int fake_live_execs(void) { return live_execs; }

int cuStreamBeginCapture_v2(void* stream, int mode) {
  MAY_FAIL(cuStreamBeginCapture_v2);
  if (mode != 1) return kInvalidValue;  // thread-local
  auto* graph = new FakeGraph;
  FakeCapture(stream, &NewNode(graph)->tasks);
  captures[stream] = graph;
  ++live_graphs;
  return 0;
}
int cuStreamEndCapture(void* stream, FakeGraph** graph) {
  FakeCapture(stream, nullptr);
  *graph = captures[stream];
  captures.erase(stream);
  if (const int code = FakeFails("cuStreamEndCapture")) {
    --live_graphs;
    delete *graph;
    return *graph = nullptr, code;
  }
  return *graph == nullptr ? kCaptureWrong : 0;
}
int cuGraphCreate(FakeGraph** graph, unsigned) {
  MAY_FAIL(cuGraphCreate);
  ++live_graphs;
  return *graph = new FakeGraph, 0;
}
int cuGraphDestroy(FakeGraph* graph) {
  --live_graphs;
  return delete graph, 0;
}
int cuGraphAddKernelNode_v2(Node** node, FakeGraph* graph, Node* const* before, size_t count,
                            const KernelParameters* parameters) {
  MAY_FAIL(cuGraphAddKernelNode_v2);
  if ((*node = NewNode(graph, before, count)) == nullptr) return kInvalidValue;
  return SetKernel(*parameters, *node), 0;
}
int cuGraphKernelNodeSetAttribute(Node* node, int attribute, const void* value) {
  MAY_FAIL(cuGraphKernelNodeSetAttribute);
  if (attribute != 2) return kInvalidValue;
  return node->cooperative = *static_cast<const int*>(value) != 0, 0;
}
int cuGraphAddMemsetNode(Node** node, FakeGraph* graph, Node* const* before, size_t count,
                         const MemsetParameters* parameters, void*) {
  MAY_FAIL(cuGraphAddMemsetNode);
  if ((*node = NewNode(graph, before, count)) == nullptr) return kInvalidValue;
  return SetMemset(*parameters, *node), 0;
}
int cuGraphAddChildGraphNode(Node** node, FakeGraph* graph, Node* const* before, size_t count,
                             const FakeGraph* child) {
  MAY_FAIL(cuGraphAddChildGraphNode);
  if ((*node = NewNode(graph, before, count)) == nullptr) return kInvalidValue;
  (*node)->child = true;
  return (*node)->tasks = TasksOf(*child), 0;
}
int cuGraphInstantiateWithFlags(FakeExec** exec, FakeGraph* graph, unsigned long long) {
  MAY_FAIL(cuGraphInstantiateWithFlags);
  ++live_execs;
  *exec = new FakeExec;
  for (const auto& node : graph->nodes) (*exec)->nodes.emplace_back(node.get(), *node);
  return 0;
}
int cuGraphExecDestroy(FakeExec* exec) {
  --live_execs;
  return delete exec, 0;
}
int cuGraphLaunch(FakeExec* exec, void* stream) {
  MAY_FAIL(cuGraphLaunch);
  FakeLaunchWhen(stream, [before = exec->ended] { return *before; });
  for (auto& task : InSomeOrder(*exec)) FakeLaunch(stream, std::move(task));
  exec->ended = std::make_shared<bool>(false);
  FakeLaunch(stream, [ended = exec->ended] { *ended = true; });
  return 0;
}
int cuGraphExecKernelNodeSetParams_v2(FakeExec* exec, Node* node,
                                      const KernelParameters* parameters) {
  MAY_FAIL(cuGraphExecKernelNodeSetParams_v2);
  Node* content = exec->Find(node);
  if (content == nullptr || !content->kernel) return kInvalidValue;
  return SetKernel(*parameters, content), 0;
}
int cuGraphExecMemsetNodeSetParams(FakeExec* exec, Node* node, const MemsetParameters* parameters,
                                   void*) {
  MAY_FAIL(cuGraphExecMemsetNodeSetParams);
  Node* content = exec->Find(node);
  if (content == nullptr || content->kernel || content->child) return kInvalidValue;
  return SetMemset(*parameters, content), 0;
}
int cuGraphExecChildGraphNodeSetParams(FakeExec* exec, Node* node, const FakeGraph* child) {
  MAY_FAIL(cuGraphExecChildGraphNodeSetParams);
  Node* content = exec->Find(node);
  if (content == nullptr || !content->child) return kInvalidValue;
  FakeTasks tasks = TasksOf(*child);
  if (tasks.size() != content->tasks.size()) return kUpdateFailed;
  return content->tasks = std::move(tasks), 0;
}

}  // extern "C"
