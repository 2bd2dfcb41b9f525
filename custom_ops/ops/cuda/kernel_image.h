// What any GPU kernel is, apart from what an op adds to it (custom_ops/jit/image.py writes it):
// an element of an attribute `programs`, and its code. Knows neither TensorFlow nor a driver.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "custom_ops/ops/text_reader.h"

namespace tfmem {

// The lines "key value..." behind the line "kernel 1". An op reads the keys that it knows.
class KernelHeader {
 public:
  // InvalidArgument if it is no header, or if a key stands there twice. The text outlives it.
  static absl::StatusOr<KernelHeader> Parse(absl::string_view text);

  // Whether there is the line of a key, behind which the reader then is.
  bool Find(absl::string_view key);
  TextReader& reader() { return in_; }
  // What stands behind a key; empty if it does not stand there.
  absl::string_view Text(absl::string_view key) { return Find(key) ? in_.Rest() : ""; }
  // Numbers from `least` to `most`, one or any number; else `status` says what was found.
  int64_t Number(absl::string_view key, int64_t least, int64_t most);
  std::vector<int64_t> Numbers(absl::string_view key, int64_t least, int64_t most);
  const absl::Status& status() const { return in_.status(); }

 private:
  explicit KernelHeader(absl::string_view text);

  TextReader in_;
  std::map<absl::string_view, TextReader::Place> entries_;  // what is behind each key
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

// `code`: what the graph has under the digest of the header; empty if it has nothing.
// InvalidArgument says what is wrong; that the digest is another's, too.
absl::StatusOr<KernelImage> ReadImage(KernelHeader* header, absl::string_view code);

// The code, once in this process however many graphs and ops hold it. It is compared, or its digest
// computed, before it is shared: what a graph calls it is a stranger's word. InvalidArgument if
// that is wrong.
absl::StatusOr<KernelCode> ShareCode(const std::string& digest, absl::string_view code);

}  // namespace tfmem
