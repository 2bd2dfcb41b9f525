// A server in small: loads an op library and a SavedModel through TensorFlow's C API, as a program
// without Python does, and runs one signature: serve_saved_model LIBRARY MODEL OUTPUT INPUT... ;
// prints the numbers of the output. LIBRARY is "" where the system's loader has it (LD_PRELOAD). An
// INPUT is NAME=float:SIZE,SIZE,... for ones of a shape, or NAME=int32:NUMBER,NUMBER,... (or int64)
// for a vector; a ragged tensor is two vectors, its values and where its rows begin.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "tensorflow/c/c_api.h"

namespace {

void Require(const TF_Status* status, const char* what) {
  if (TF_GetCode(status) == TF_OK) return;
  std::fprintf(stderr, "cannot %s: %s\n", what, TF_Message(status));
  std::exit(1);
}

std::vector<int64_t> Numbers(const std::string& text) {
  std::vector<int64_t> numbers;
  for (size_t at = 0; at < text.size(); at = std::min(text.find(',', at), text.size()) + 1) {
    numbers.push_back(std::atoll(text.c_str() + at));
  }
  return numbers;
}

template <typename T>
TF_Tensor* Filled(TF_DataType type, const std::vector<int64_t>& shape,
                  const std::vector<T>& values) {
  TF_Tensor* tensor = TF_AllocateTensor(type, shape.data(), static_cast<int>(shape.size()),
                                        values.size() * sizeof(T));
  std::copy(values.begin(), values.end(), static_cast<T*>(TF_TensorData(tensor)));
  return tensor;
}

TF_Tensor* TensorOf(const std::string& type, const std::vector<int64_t>& numbers) {
  const std::vector<int64_t> vector{static_cast<int64_t>(numbers.size())};
  if (type == "int64") return Filled(TF_INT64, vector, numbers);
  if (type == "int32") {
    return Filled(TF_INT32, vector, std::vector<int32_t>(numbers.begin(), numbers.end()));
  }
  size_t size = 1;
  for (int64_t each : numbers) size *= each;
  return Filled(TF_FLOAT, numbers, std::vector<float>(size, 1.0f));
}

TF_Output OperationOf(TF_Graph* graph, const std::string& name) {
  TF_Operation* found = TF_GraphOperationByName(graph, name.c_str());
  if (found == nullptr) {
    std::fprintf(stderr, "the graph has no op %s\n", name.c_str());
    std::exit(1);
  }
  return {found, 0};
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 5) return 2;
  TF_Status* status = TF_NewStatus();
  if (*arguments[1] != '\0') TF_LoadLibrary(arguments[1], status);
  Require(status, "load the op library");
  TF_SessionOptions* options = TF_NewSessionOptions();
  TF_Graph* graph = TF_NewGraph();
  const char* tag = "serve";
  TF_Session* session =
      TF_LoadSessionFromSavedModel(options, nullptr, arguments[2], &tag, 1, graph, nullptr, status);
  Require(status, "load the SavedModel");

  std::vector<TF_Output> inputs;
  std::vector<TF_Tensor*> values;
  for (int i = 4; i < count; ++i) {
    const std::string given = arguments[i];
    const size_t equals = given.find('='), colon = given.find(':', equals);
    if (colon == std::string::npos) return 2;
    inputs.push_back(OperationOf(graph, given.substr(0, equals)));
    values.push_back(
        TensorOf(given.substr(equals + 1, colon - equals - 1), Numbers(given.substr(colon + 1))));
  }
  const TF_Output output = OperationOf(graph, arguments[3]);
  TF_Tensor* result = nullptr;
  TF_SessionRun(session, nullptr, inputs.data(), values.data(), static_cast<int>(inputs.size()),
                &output, &result, 1, nullptr, 0, nullptr, status);
  Require(status, "run the signature");
  const float* numbers = static_cast<const float*>(TF_TensorData(result));
  for (int64_t i = 0; i < TF_TensorElementCount(result); ++i) std::printf("%.9g\n", numbers[i]);
  for (TF_Tensor* value : values) TF_DeleteTensor(value);
  TF_DeleteTensor(result);
  TF_CloseSession(session, status);
  TF_DeleteSession(session, status);
  TF_DeleteGraph(graph);
  TF_DeleteSessionOptions(options);
  TF_DeleteStatus(status);
}
