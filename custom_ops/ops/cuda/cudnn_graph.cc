#include "custom_ops/ops/cuda/cudnn_graph.h"

#include "custom_ops/ops/status_macros.h"

namespace tfmem {

absl::StatusOr<CudnnDescriptor> CudnnDescriptor::Open(const cudnn::Library& library,
                                                      cudnn::Kind kind) {
  CudnnDescriptor opened(library);
  TFMEM_CUDNN_RETURN_IF_ERROR(library, cudnnBackendCreateDescriptor, kind, &opened.descriptor_);
  return opened;
}

absl::StatusOr<CudnnDescriptor> CudnnDescriptor::Make(
    const cudnn::Library& library, cudnn::Kind kind,
    std::initializer_list<CudnnAttribute> attributes) {
  TFMEM_ASSIGN_OR_RETURN(CudnnDescriptor made, Open(library, kind));
  for (const CudnnAttribute& each : attributes) {
    TFMEM_CUDNN_RETURN_IF_ERROR(library, cudnnBackendSetAttribute, made.descriptor_, each.name,
                                each.type, each.count, each.values);
  }
  TFMEM_CUDNN_RETURN_IF_ERROR(library, cudnnBackendFinalize, made.descriptor_);
  return made;
}

absl::StatusOr<int64_t> CudnnDescriptor::Count(int attribute, cudnn::AttributeType type) const {
  int64_t count = 0;
  TFMEM_RETURN_IF_ERROR(Get(attribute, type, 0, &count, nullptr));
  return count;
}

absl::StatusOr<std::vector<CudnnDescriptor>> CudnnDescriptor::Parts(int attribute, cudnn::Kind kind,
                                                                    int64_t count) const {
  std::vector<CudnnDescriptor> parts;
  std::vector<cudnn::Descriptor> places;
  for (int64_t i = 0; i < count; ++i) {
    TFMEM_ASSIGN_OR_RETURN(CudnnDescriptor part, Open(*library_, kind));
    places.push_back(part.get());
    parts.push_back(std::move(part));
  }
  int64_t found = 0;
  TFMEM_RETURN_IF_ERROR(Get(attribute, cudnn::kDescriptorType, count, &found, places.data()));
  while (static_cast<int64_t>(parts.size()) > found) parts.pop_back();
  return parts;
}

absl::Status CudnnDescriptor::Get(int attribute, cudnn::AttributeType type, int64_t most,
                                  int64_t* count, void* values) const {
  TFMEM_CUDNN_RETURN_IF_ERROR(*library_, cudnnBackendGetAttribute, descriptor_, attribute, type,
                              most, count, values);
  return absl::OkStatus();
}

}  // namespace tfmem
