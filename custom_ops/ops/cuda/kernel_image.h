// What any GPU kernel is, apart from what an op adds to it (custom_ops/jit/image.py writes it):
// an element of an attribute `programs`, and its code. Knows neither TensorFlow nor a driver.
#ifndef TFMEM_CUSTOM_OPS_OPS_CUDA_KERNEL_IMAGE_H_
#define TFMEM_CUSTOM_OPS_OPS_CUDA_KERNEL_IMAGE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tfmem {

// The lines "key value" behind the line "kernel 1". An op reads the keys that it knows.
class KernelHeader {
 public:
  // InvalidArgument if it is no header, or if a key stands there twice.
  static absl::StatusOr<KernelHeader> Parse(absl::string_view text);

  std::string Text(absl::string_view key) const;
  // A number from `least` to `most`; else `status` says what was found.
  int64_t Number(absl::string_view key, int64_t least, int64_t most);
  const absl::Status& status() const { return status_; }

  // The code that stands behind the header of a "program 4", the format before this one; else
  // empty.
  const std::string& code() const { return code_; }

 private:
  std::map<std::string, std::string> entries_;
  std::string code_;
  absl::Status status_;
};

// InvalidArgument about attribute `programs`, with what to do.
absl::Status WrongProgram(absl::string_view what);

using KernelCode = std::shared_ptr<const std::string>;  // c_str() ends with a zero, as PTX has to

struct KernelImage {
  bool cubin = false;        // else PTX
  int64_t arch = 0;          // 90 for 9.0; of a cubin the only one, of PTX the least
  std::string entry;         // name of the kernel
  int64_t threads = 1;       // of a CTA
  int64_t shared = 0;        // dynamic shared memory of a CTA, bytes
  int64_t cluster = 1;       // CTAs of a thread-block cluster; 1: none
  bool cooperative = false;  // all CTAs of a launch have to run at once
  std::string digest;        // SHA-256 of the code
  KernelCode code;
};

// `code`: what the graph has under the digest of the header; empty if it has nothing, as it may for
// a "program 4". InvalidArgument says what is wrong; that the digest is another's, too.
absl::StatusOr<KernelImage> ReadImage(KernelHeader* header, absl::string_view code);

// The code, once in this process however many graphs and ops hold it. It is compared, or its digest
// computed, before it is shared: what a graph calls it is a stranger's word. InvalidArgument if
// that is wrong.
absl::StatusOr<KernelCode> ShareCode(const std::string& digest, absl::string_view code);

}  // namespace tfmem

#endif  // TFMEM_CUSTOM_OPS_OPS_CUDA_KERNEL_IMAGE_H_
