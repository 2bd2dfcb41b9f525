#include "custom_ops/ops/fusion/fusion_kernel.h"

#include <algorithm>
#include <limits>
#include <map>

#include "absl/strings/str_cat.h"
#include "custom_ops/ops/sizes.h"
#include "custom_ops/ops/status_macros.h"
#include "custom_ops/ops/text_reader.h"

namespace tfmem {
namespace {

constexpr int64_t kNarrow = int64_t{1} << 30;  // positions that 32-bit indices go through
constexpr int64_t kMostAlignment = 16;
constexpr size_t kMostWords = 4095;  // CUDA's limit of a parameter is 32,764 bytes
constexpr int64_t kMostKernelNumber = std::numeric_limits<int64_t>::max();

// The lines that are this op's own, checked against the program that the kernel computes.
class KernelParser {
 public:
  KernelParser(KernelHeader* header, const Expression& program, FusionKernel* kernel)
      : header_(*header), in_(header->reader()), program_(program), kernel_(*kernel) {}

  bool Read() {
    return Each("pieces", [&] { return ReadPiece(&kernel_.pieces.emplace_back()); }) &&
           Each("buffers", [&] { return ReadSizes(true, &kernel_.buffers.emplace_back()); }) &&
           Each("words", [&] { return ReadWord(); }) &&
           Each("spans", [&] { return ReadSizes(false, &kernel_.spans.emplace_back()); }) &&
           Each("in_place", [&] { return ReadInPlace(&kernel_.in_place.emplace_back()); }) &&
           (!kernel_.pieces.empty() || in_.Wrong("there are no pieces"));
  }

 private:
  // The words of a key's line, if there is one.
  template <typename ReadOne>
  bool Each(absl::string_view key, ReadOne read) {
    if (!header_.Find(key)) return true;
    while (in_.NextWord()) {
      if (!read()) return false;
    }
    return in_.End();
  }

  // TENSOR,TENSOR...:OUTPUT,OUTPUT...
  bool ReadInPlace(KernelInPlace* group) {
    return ReadNumbers(program_.tensors.size(), &group->tensors) && in_.Separator(":") &&
           ReadNumbers(program_.outputs.size(), &group->outputs);
  }

  // NUMBER,NUMBER... below `end`, ascending.
  bool ReadNumbers(size_t end, std::vector<int>* numbers) {
    do {
      const int last = numbers->empty() ? -1 : numbers->back();
      if (!in_.Below(end, &numbers->emplace_back())) return false;
      if (numbers->back() <= last) return in_.Expected("a larger number than the one before");
    } while (in_.Take(","));
    return true;
  }

  // TENSOR:FIRST:LAST, of which the tensor is read.
  bool ReadDimensions(KernelSize* size) {
    if (size->number >= static_cast<int64_t>(program_.tensors.size())) {
      return in_.Expected("a tensor of the program");
    }
    const size_t rank = program_.tensors[size->number].rank;
    size->kind = KernelSize::Kind::kExtent;
    return in_.Separator(":") && in_.Below(rank, &size->first) && in_.Separator(":") &&
           in_.Below(rank, &size->last);
  }

  // NUMBER, an extent, or ctas:PIECE
  bool ReadSize(bool of_buffer, KernelSize* size) {
    if (of_buffer && in_.Take("ctas:")) {
      size->kind = KernelSize::Kind::kCtas;
      return in_.Below(kernel_.pieces.size(), &size->number);
    }
    if (!in_.Number(0, kMostKernelNumber, &size->number)) return false;
    return !in_.Follows(":") || ReadDimensions(size);
  }

  // SIZE*SIZE...
  bool ReadSizes(bool of_buffer, std::vector<KernelSize>* sizes) {
    do {
      if (!ReadSize(of_buffer, &sizes->emplace_back())) return false;
    } while (in_.Take("*"));
    return true;
  }

  bool ReadWord() {
    using Kind = KernelWord::Kind;
    if (kernel_.words.size() == kMostWords) return in_.Wrong("too many words");
    KernelWord* word = &kernel_.words.emplace_back();
    if (in_.TakeWord("barrier")) {
      word->kind = Kind::kBarrier;
      return kernel_.image.cooperative || in_.Wrong("a barrier, and CTAs need not run at once");
    }
    if (in_.TakeWord("tf32")) {
      word->kind = Kind::kTf32;
      return true;
    }
    if (in_.Take("extent:")) {
      word->kind = Kind::kExtent;
      return in_.Below(program_.tensors.size(), &word->extent.number) &&
             ReadDimensions(&word->extent);
    }
    const std::pair<absl::string_view, std::pair<Kind, size_t>> kinds[] = {
        {"tensor:", {Kind::kTensor, program_.tensors.size()}},
        {"output:", {Kind::kOutput, program_.outputs.size()}},
        {"buffer:", {Kind::kBuffer, kernel_.buffers.size()}},
        {"first:", {Kind::kFirst, kernel_.pieces.size()}},
        {"ctas:", {Kind::kCtas, kernel_.pieces.size()}},
    };
    for (const auto& [name, kind] : kinds) {
      if (!in_.Take(name)) continue;
      word->kind = kind.first;
      return in_.Below(kind.second, &word->number);
    }
    return in_.Expected("a word of a kernel");
  }

  // PHASE/MOST/SLABS/FACTOR/FACTOR..., a FACTOR being EACH*SIZE*SIZE...
  bool ReadPiece(KernelPiece* piece) {
    if (!in_.Number(0, std::numeric_limits<int>::max(), &piece->phase) || !in_.Separator("/") ||
        !in_.Number(0, kMostKernelNumber, &piece->most) || !in_.Separator("/") ||
        !in_.Number(1, kMostKernelNumber, &piece->slabs)) {
      return false;
    }
    while (in_.Take("/")) {
      auto& [each, sizes] = piece->factors.emplace_back();
      if (!in_.Number(1, kMostKernelNumber, &each)) return false;
      if (in_.Take("*") && !ReadSizes(false, &sizes)) return false;
    }
    return true;
  }

  KernelHeader& header_;
  TextReader& in_;
  const Expression& program_;
  FusionKernel& kernel_;
};

Size ValueOf(const KernelSize& size, const std::vector<Shape>& shapes,
             const std::vector<int64_t>& ctas) {
  switch (size.kind) {
    case KernelSize::Kind::kNumber:
      return size.number;
    case KernelSize::Kind::kCtas:
      return ctas[size.number];
    case KernelSize::Kind::kExtent:
      break;
  }
  Size product = 1;
  for (int i = size.first; i <= size.last; ++i) product = product * shapes[size.number][i];
  return product;
}

Size ProductOf(const std::vector<KernelSize>& sizes, const std::vector<Shape>& shapes,
               const std::vector<int64_t>& ctas = {}) {
  Size product = 1;
  for (const KernelSize& size : sizes) product = product * ValueOf(size, shapes, ctas);
  return product;
}

absl::Status TooLarge() {
  return absl::FailedPreconditionError("its tensors are larger than its kernels count");
}

}  // namespace

absl::StatusOr<FusionKernel> FusionKernel::Read(const std::string& text, absl::string_view code,
                                                const Expression& program) {
  FusionKernel kernel;
  TFMEM_ASSIGN_OR_RETURN(KernelHeader header, KernelHeader::Parse(text));
  TFMEM_ASSIGN_OR_RETURN(kernel.image, ReadImage(&header, code));
  kernel.single = header.Number("single", 0, 1) != 0;
  kernel.wide = header.Number("wide", 0, 1) != 0;
  kernel.alignment = header.Number("align", 1, kMostAlignment);
  if (!header.status().ok()) return header.status();
  if (KernelParser(&header, program, &kernel).Read()) return kernel;
  return header.reader().failure();
}

bool FusionKernel::MayShare(int tensor, int output) const {
  const auto has = [](const std::vector<int>& numbers, int number) {
    return std::binary_search(numbers.begin(), numbers.end(), number);
  };
  return std::any_of(in_place.begin(), in_place.end(), [&](const KernelInPlace& group) {
    return has(group.tensors, tensor) && has(group.outputs, output);
  });
}

// Fewer CTAs, so that those of each phase run at once; any number computes the same.
absl::Status FusionKernel::Fit(int64_t resident, std::vector<int64_t>* ctas) const {
  std::map<int, std::vector<size_t>> phases;
  for (size_t i = 0; i < pieces.size(); ++i) phases[pieces[i].phase].push_back(i);
  for (auto& [phase, here] : phases) {
    int64_t total = 0, over = -resident;
    for (size_t i : here) total += (*ctas)[i];
    if (total <= resident) continue;
    for (size_t i : here) {
      const int64_t slabs = pieces[i].slabs;
      (*ctas)[i] = std::max(slabs, (*ctas)[i] * resident / total / slabs * slabs);
      over += (*ctas)[i];
    }
    // a share below one slab was rounded up: those with the most give way
    std::stable_sort(here.begin(), here.end(),
                     [&](size_t a, size_t b) { return (*ctas)[a] > (*ctas)[b]; });
    for (size_t i : here) {
      const int64_t slabs = pieces[i].slabs, wanted = std::max<int64_t>(over, 0);
      const int64_t fewer = std::min((wanted + slabs - 1) / slabs * slabs, (*ctas)[i] - slabs);
      (*ctas)[i] -= fewer;
      over -= fewer;
    }
    if (over > 0) {
      return absl::FailedPreconditionError(absl::StrCat(
          "it needs ", resident + over, " CTAs at once; this GPU runs ", resident, " of them"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<KernelLaunch> FusionKernel::Launch(const std::vector<Shape>& shapes,
                                                  int64_t resident) const {
  for (const std::vector<KernelSize>& span : spans) {
    const Size positions = ProductOf(span, shapes);
    if (!positions.ok() || (!wide && positions.value() >= kNarrow)) return TooLarge();
  }
  std::vector<int64_t> ctas, firsts;
  for (const KernelPiece& piece : pieces) {
    Size blocks = 1;
    for (const auto& [each, sizes] : piece.factors) {
      const Size product = ProductOf(sizes, shapes);
      if (!product.ok()) return TooLarge();
      blocks = blocks * (product.value() / each + (product.value() % each > 0));
    }
    if (!blocks.ok()) return TooLarge();
    const int64_t wanted = std::max<int64_t>(blocks.value(), 1);
    const Size count = Size(piece.most > 0 ? std::min(wanted, piece.most) : wanted) * piece.slabs;
    if (!count.ok() || count.value() > kMostOfASize) return TooLarge();
    ctas.push_back(count.value());
  }
  if (image.cooperative) TFMEM_RETURN_IF_ERROR(Fit(resident, &ctas));
  KernelLaunch launch;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const bool beside = i > 0 && pieces[i - 1].phase == pieces[i].phase && !single;
    firsts.push_back(beside ? firsts.back() + ctas[i - 1] : 0);
    launch.ctas = std::max(launch.ctas, firsts[i] + ctas[i]);
  }
  if (launch.ctas > kMostOfASize) return TooLarge();
  for (const std::vector<KernelSize>& buffer : buffers) {
    const Size bytes = ProductOf(buffer, shapes, ctas);
    if (!bytes.ok()) return TooLarge();
    launch.buffers.push_back(bytes.value());
  }
  for (const KernelWord& word : words) {
    using Kind = KernelWord::Kind;
    const Size extent = word.kind == Kind::kExtent ? ValueOf(word.extent, shapes, ctas) : Size(0);
    if (!extent.ok()) return TooLarge();
    launch.numbers.push_back(word.kind == Kind::kFirst  ? firsts[word.number]
                             : word.kind == Kind::kCtas ? ctas[word.number]
                                                        : extent.value());
  }
  return launch;
}

}  // namespace tfmem
