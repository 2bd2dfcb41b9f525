#include "custom_ops/ops/random/shared_kernels.h"

#include <map>
#include <memory>
#include <mutex>
#include <random>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "custom_ops/ops/process_wide.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/kernel_def.pb.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_def.pb.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tfmem {
namespace {

using ::tensorflow::NodeDef;
using ::tensorflow::OpDef;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::OpRegistrationData;
using ::tensorflow::OpRegistry;

constexpr char kPrefix[] = "TfmemShared";
constexpr char kStream[] = "tfmem_stream";
constexpr char kDraw[] = "tfmem_draw";

// The kernels of a stream. Those that run them own it.
struct Stream {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<OpKernel>> kernels;
};

struct Streams {
  std::mutex mutex;
  std::map<int64_t, std::weak_ptr<Stream>> open;
};

std::shared_ptr<Stream> FindStream(int64_t id) {
  Streams& all = ProcessWide<Streams>();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.open.find(id);
  if (found == all.open.end()) return nullptr;
  std::shared_ptr<Stream> stream = found->second.lock();
  if (stream == nullptr) found->second = stream = std::make_shared<Stream>();
  return stream;
}

// The op that `shared` stands for.
NodeDef Original(const NodeDef& shared) {
  NodeDef original = shared;
  original.set_op(shared.op().substr(sizeof(kPrefix) - 1));
  original.mutable_attr()->erase(kStream);
  original.mutable_attr()->erase(kDraw);
  return original;
}

// Graphs that differ in an op's seeds or types differ in its kernel, whatever they call it.
std::string KeyOf(const NodeDef& original, const std::string& draw, const std::string& device) {
  std::string key = absl::StrCat(draw, "|", device, "|", original.op());
  std::map<std::string, std::string> attributes;
  for (const auto& [name, value] : original.attr()) {
    if (!absl::StartsWith(name, "_")) attributes[name] = value.SerializeAsString();
  }
  for (const auto& [name, value] : attributes) absl::StrAppend(&key, "|", name, "=", value);
  return key;
}

class SharedOp : public OpKernel {
 public:
  explicit SharedOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    int64_t id = 0;
    std::string draw;
    OP_REQUIRES_OK(ctx, ctx->GetAttr(kStream, &id));
    OP_REQUIRES_OK(ctx, ctx->GetAttr(kDraw, &draw));
    stream_ = FindStream(id);
    OP_REQUIRES(
        ctx, stream_ != nullptr,
        absl::FailedPreconditionError(absl::StrCat(
            "'", name(), "' goes on with a stream of random numbers that this process does not ",
            "have: the graph is a step of another process; optimise the original again")));
    const NodeDef original = Original(def());
    std::lock_guard<std::mutex> lock(stream_->mutex);
    std::shared_ptr<OpKernel>& kernel =
        stream_->kernels[KeyOf(original, draw, ctx->device()->name())];
    if (kernel == nullptr) {
      absl::Status status;
      kernel =
          tensorflow::CreateOpKernel(ctx->device_type(), ctx->device(),
                                     ctx->device()->GetAllocator(tensorflow::AllocatorAttributes()),
                                     original, ctx->graph_def_version(), &status);
      OP_REQUIRES_OK(ctx, status);
    }
    OP_REQUIRES(ctx, kernel->AsAsync() == nullptr,
                absl::UnimplementedError(
                    absl::StrCat(original.op(), " is asynchronous: it cannot be shared")));
    kernel_ = kernel;
  }

  // Inputs and outputs are the same, by number and by name.
  void Compute(OpKernelContext* ctx) override { kernel_->Compute(ctx); }

  bool IsExpensive() override { return kernel_->IsExpensive(); }

 private:
  std::shared_ptr<Stream> stream_;
  std::shared_ptr<OpKernel> kernel_;
};

bool HasSeeds(const OpDef& op) {
  int seeds = 0;
  for (const OpDef::AttrDef& attr : op.attr()) {
    seeds += attr.type() == "int" && (attr.name() == "seed" || attr.name() == "seed2");
  }
  return seeds == 2;
}

bool IsHandle(const OpDef::ArgDef& argument) {
  return argument.is_ref() || argument.type() == tensorflow::DT_RESOURCE ||
         argument.type() == tensorflow::DT_VARIANT;
}

bool MayShare(const OpDef& op) {
  if (!op.is_stateful() || absl::StartsWith(op.name(), kPrefix)) return false;
  const bool reads_on = op.name() == "RecordInput" || op.name() == "Skipgram";
  if (!HasSeeds(op) && !reads_on) return false;
  for (const OpDef::ArgDef& input : op.input_arg()) {
    if (IsHandle(input)) return false;
  }
  for (const OpDef::ArgDef& output : op.output_arg()) {
    if (IsHandle(output)) return false;
  }
  return true;
}

void Register(const OpRegistrationData& original) {
  OpRegistrationData shared;
  shared.op_def = original.op_def;
  shared.shape_inference_fn = original.shape_inference_fn;
  shared.op_def.set_name(kPrefix + original.op_def.name());
  OpDef::AttrDef* stream = shared.op_def.add_attr();
  stream->set_name(kStream);
  stream->set_type("int");
  OpDef::AttrDef* draw = shared.op_def.add_attr();
  draw->set_name(kDraw);
  draw->set_type("string");
  OpRegistry::Global()->Register([shared](OpRegistrationData* data) {
    *data = shared;
    return absl::OkStatus();
  });
  const tensorflow::KernelList kernels =
      tensorflow::GetRegisteredKernelsForOp(original.op_def.name());
  for (const tensorflow::KernelDef& kernel : kernels.kernel()) {
    if (kernel.device_type() != tensorflow::DEVICE_CPU &&
        kernel.device_type() != tensorflow::DEVICE_GPU) {
      continue;
    }
    auto* copy = new tensorflow::KernelDef(kernel);  // the registry takes it
    copy->set_op(shared.op_def.name());
    tensorflow::kernel_factory::OpKernelRegistrar(
        copy, "tfmem::SharedOp",
        [](OpKernelConstruction* ctx) -> OpKernel* { return new SharedOp(ctx); });
  }
}

}  // namespace

bool ShareOp(const std::string& op) {
  static std::mutex* mutex = new std::mutex;
  static auto* shared = new std::map<std::string, bool>;
  std::lock_guard<std::mutex> lock(*mutex);
  auto known = shared->find(op);
  if (known != shared->end()) return known->second;
  const OpRegistrationData* original = nullptr;
  const bool found = OpRegistry::Global()->LookUp(op, &original).ok();
  const bool may = found && MayShare(original->op_def);
  if (may) Register(*original);
  if (found) (*shared)[op] = may;
  return may;
}

int64_t OpenStream() {
  Streams& all = ProcessWide<Streams>();
  std::lock_guard<std::mutex> lock(all.mutex);
  std::random_device device;
  int64_t id = 0;
  do {
    const uint64_t high = device(), low = device();
    id = static_cast<int64_t>((high << 32 ^ low) >> 1);
  } while (!all.open.emplace(id, std::weak_ptr<Stream>()).second);
  return id;
}

void CloseStream(int64_t stream) {
  Streams& all = ProcessWide<Streams>();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.open.erase(stream);
}

}  // namespace tfmem
