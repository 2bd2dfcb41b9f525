#include "custom_ops/ops/fusion/fusion_kernel.h"

#include <algorithm>
#include <map>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "custom_ops/ops/sizes.h"
#include "custom_ops/ops/status_macros.h"

namespace tfmem {
namespace {

constexpr int64_t kNarrow = int64_t{1} << 30;  // positions that 32-bit indices go through
constexpr int64_t kMostAlignment = 16;
constexpr int64_t kMostWords = 4095;

using Words = std::vector<absl::string_view>;

Words Split(absl::string_view text, char by) { return absl::StrSplit(text, by, absl::SkipEmpty()); }

// The lines that are this op's own, checked against the program that the kernel computes.
class Reader {
 public:
  Reader(const KernelHeader& header, const Expression& program, FusionKernel* kernel)
      : header_(header), program_(program), kernel_(*kernel) {}

  absl::Status Read() {
    const std::string pieces = header_.Text("pieces"), buffers = header_.Text("buffers");
    const Words piece_texts = Split(pieces, ' ');
    kernel_.pieces.resize(piece_texts.size());
    for (size_t i = 0; i < piece_texts.size(); ++i) {
      if (!ReadPiece(piece_texts[i], &kernel_.pieces[i])) return Wrong("pieces", piece_texts[i]);
    }
    for (absl::string_view text : Split(buffers, ' ')) {
      if (!ReadSizes(Split(text, '*'), &kernel_.buffers.emplace_back(), true)) {
        return Wrong("buffers", text);
      }
    }
    const std::string words = header_.Text("words"), spans = header_.Text("spans");
    for (absl::string_view text : Split(words, ' ')) {
      if (!ReadWord(text, &kernel_.words.emplace_back())) return Wrong("words", text);
    }
    for (absl::string_view text : Split(spans, ' ')) {
      if (!ReadSizes(Split(text, '*'), &kernel_.spans.emplace_back())) return Wrong("spans", text);
    }
    const std::string in_place = header_.Text("in_place");
    for (absl::string_view text : Split(in_place, ' ')) {
      const Words pair = absl::StrSplit(text, ':');
      auto& [tensor, output] = kernel_.in_place.emplace_back();
      if (pair.size() != 2 || !Below(pair[0], program_.tensors.size(), &tensor) ||
          !Below(pair[1], program_.outputs.size(), &output)) {
        return Wrong("in_place", text);
      }
    }
    if (kernel_.pieces.empty()) return Wrong("pieces", "");
    if (kernel_.words.size() > kMostWords) return Wrong("words", absl::StrCat("of them too many"));
    return absl::OkStatus();
  }

 private:
  static absl::Status Wrong(absl::string_view key, absl::string_view text) {
    return WrongProgram(absl::StrCat("'", text.substr(0, 40), "' of '", key, "' cannot be read"));
  }

  static bool Below(absl::string_view text, size_t end, int* number) {
    return absl::SimpleAtoi(text, number) && *number >= 0 && static_cast<size_t>(*number) < end;
  }

  // TENSOR:FIRST:LAST
  bool ReadExtent(absl::string_view text, KernelSize* size) const {
    const Words parts = absl::StrSplit(text, ':');
    int tensor = 0;
    size->kind = KernelSize::Kind::kExtent;
    if (parts.size() != 3 || !Below(parts[0], program_.tensors.size(), &tensor)) return false;
    size->number = tensor;
    const size_t rank = program_.tensors[tensor].rank;
    return Below(parts[1], rank, &size->first) && Below(parts[2], rank, &size->last);
  }

  bool ReadSize(absl::string_view text, bool of_buffer, KernelSize* size) const {
    if (of_buffer && absl::ConsumePrefix(&text, "ctas:")) {
      int piece = 0;
      size->kind = KernelSize::Kind::kCtas;
      if (!Below(text, kernel_.pieces.size(), &piece)) return false;
      size->number = piece;
      return true;
    }
    if (text.find(':') != absl::string_view::npos) return ReadExtent(text, size);
    return absl::SimpleAtoi(text, &size->number) && size->number >= 0;
  }

  bool ReadSizes(const Words& texts, std::vector<KernelSize>* sizes, bool of_buffer = false) const {
    return std::all_of(texts.begin(), texts.end(), [&](absl::string_view text) {
      return ReadSize(text, of_buffer, &sizes->emplace_back());
    });
  }

  bool ReadWord(absl::string_view text, KernelWord* word) const {
    using Kind = KernelWord::Kind;
    if (text == "barrier") {
      word->kind = Kind::kBarrier;
      return kernel_.image.cooperative;
    }
    if (text == "tf32") {
      word->kind = Kind::kTf32;
      return true;
    }
    const size_t colon = text.find(':');
    if (colon == absl::string_view::npos) return false;
    const absl::string_view rest = text.substr(colon + 1);
    const absl::string_view name = text.substr(0, colon);
    if (name == "extent") {
      word->kind = Kind::kExtent;
      return ReadExtent(rest, &word->extent);
    }
    const std::pair<absl::string_view, std::pair<Kind, size_t>> kinds[] = {
        {"tensor", {Kind::kTensor, program_.tensors.size()}},
        {"output", {Kind::kOutput, program_.outputs.size()}},
        {"buffer", {Kind::kBuffer, kernel_.buffers.size()}},
        {"first", {Kind::kFirst, kernel_.pieces.size()}},
        {"ctas", {Kind::kCtas, kernel_.pieces.size()}},
    };
    for (const auto& [known, kind] : kinds) {
      if (name != known) continue;
      word->kind = kind.first;
      return Below(rest, kind.second, &word->number);
    }
    return false;
  }

  // PHASE/MOST/SLABS/FACTOR/FACTOR...
  bool ReadPiece(absl::string_view text, KernelPiece* piece) const {
    const Words parts = absl::StrSplit(text, '/');
    if (parts.size() < 3 || !absl::SimpleAtoi(parts[0], &piece->phase) ||
        !absl::SimpleAtoi(parts[1], &piece->most) || !absl::SimpleAtoi(parts[2], &piece->slabs) ||
        piece->phase < 0 || piece->most < 0 || piece->slabs < 1) {
      return false;
    }
    for (size_t i = 3; i < parts.size(); ++i) {
      const Words sizes = absl::StrSplit(parts[i], '*');
      auto& [each, factor] = piece->factors.emplace_back();
      if (!absl::SimpleAtoi(sizes[0], &each) || each < 1 ||
          !ReadSizes({sizes.begin() + 1, sizes.end()}, &factor)) {
        return false;
      }
    }
    return true;
  }

  const KernelHeader& header_;
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
  TFMEM_RETURN_IF_ERROR(Reader(header, program, &kernel).Read());
  return kernel;
}

bool FusionKernel::MayShare(int tensor, int output) const {
  return std::count(in_place.begin(), in_place.end(), std::make_pair(tensor, output)) > 0;
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
  std::map<int, int64_t> totals;  // of phases
  for (size_t i = 0; i < pieces.size(); ++i) totals[pieces[i].phase] += ctas[i];
  if (image.cooperative) {
    std::map<int, int64_t> fitted;
    for (size_t i = 0; i < pieces.size(); ++i) {
      const KernelPiece& piece = pieces[i];
      if (const int64_t total = totals[piece.phase]; total > resident) {
        const int64_t share = ctas[i] * resident / total / piece.slabs * piece.slabs;
        ctas[i] = std::max(piece.slabs, share);
      }
      if ((fitted[piece.phase] += ctas[i]) > resident) {
        return absl::FailedPreconditionError(absl::StrCat("it needs ", fitted[piece.phase],
                                                          " CTAs at once; this GPU runs ", resident,
                                                          " of them"));
      }
    }
  }
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
