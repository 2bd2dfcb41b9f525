#include "custom_ops/ops/fusion/executed_op.h"

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tensorflow/core/common_runtime/optimization_registry.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/graph/algorithm.h"
#include "tensorflow/core/graph/graph.h"

namespace tfmem {
namespace {

using ::tensorflow::DataTypeVector;
using ::tensorflow::Graph;
using ::tensorflow::Node;
using ::tensorflow::NodeDef;
using ::tensorflow::OptimizationPassRegistry;

constexpr char kCpu[] = "/job:localhost/replica:0/task:0/device:CPU:0";

Node* Add(NodeDef def, Graph* graph, absl::Status* status) {
  Node* node = status->ok() ? graph->AddNode(std::move(def), status) : nullptr;
  if (status->ok()) node->set_assigned_device_name(kCpu);
  return node;
}

// `node`, alone but for its arguments.
absl::Status Fill(const NodeDef& node, const DataTypeVector& inputs, Graph* graph) {
  absl::Status status;
  Node* reader = Add(node, graph, &status);
  for (size_t i = 0; i < inputs.size(); ++i) {
    NodeDef argument;
    argument.set_op("_Arg");
    argument.set_name(absl::StrCat("tfmem_argument_", i));
    (*argument.mutable_attr())["T"].set_type(inputs[i]);
    (*argument.mutable_attr())["index"].set_i(i);
    Node* source = Add(std::move(argument), graph, &status);
    if (status.ok()) graph->AddEdge(source, 0, reader, i);
  }
  tensorflow::FixupSourceAndSinkEdges(graph);  // passes begin at the source
  return status;
}

}  // namespace

NodeDef ExecutedOnCpu(const NodeDef& node, const DataTypeVector& inputs, int graph_def_version) {
  auto graph = std::make_unique<Graph>(tensorflow::OpRegistry::Global());
  tensorflow::VersionDef versions = graph->versions();
  versions.set_producer(graph_def_version);
  graph->set_versions(versions);
  if (!Fill(node, inputs, graph.get()).ok()) return node;
  tensorflow::FunctionLibraryDefinition functions(tensorflow::OpRegistry::Global(),
                                                  tensorflow::FunctionDefLibrary());
  std::unordered_map<std::string, std::unique_ptr<Graph>> partitions;
  partitions.emplace(kCpu, std::move(graph));
  tensorflow::GraphOptimizationPassOptions options;
  options.flib_def = &functions;
  options.partition_graphs = &partitions;
  const absl::Status status = OptimizationPassRegistry::Global()->RunGrouping(
      OptimizationPassRegistry::POST_PARTITIONING, options);
  if (!status.ok()) return node;
  for (const Node* executed : partitions.at(kCpu)->op_nodes()) {
    if (executed->name() != node.name()) continue;
    return executed->def();
  }
  return node;
}

}  // namespace tfmem
