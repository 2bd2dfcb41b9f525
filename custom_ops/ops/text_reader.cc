#include "custom_ops/ops/text_reader.h"

#include <algorithm>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"

namespace tfmem {
namespace {

constexpr size_t kMostShown = 80;  // characters of the text in an error

}  // namespace

bool TextReader::Format(absl::string_view format) {
  const absl::string_view line = NextLine() ? Rest() : "";
  if (line == format) return true;
  return Fail(absl::StrCat("expected ", Quoted(format), " on the first line, found ", Quoted(line),
                           ": this op library and the text's writer differ in version"));
}

bool TextReader::NextLine() {
  Place next = place_;
  do {
    next.begin = next.line == 0 ? 0 : next.end + 1;
    if (next.begin >= text_.size()) break;
    next.end = std::min(text_.find('\n', next.begin), text_.size());
    ++next.line;
  } while (next.begin == next.end);
  const bool found = next.begin < text_.size();
  if (found && !absl::StartsWith(text_.substr(next.begin), indent_)) return false;
  if (!found) next.begin = next.end = text_.size();
  next.at = next.begin + (found ? indent_.size() : 0);
  next.within = found;
  place_ = next;
  return found;
}

bool TextReader::NextWord() {
  if (!place_.within && place_.at < place_.end && text_[place_.at] == ' ') {
    while (place_.at < place_.end && text_[place_.at] == ' ') ++place_.at;
    place_.within = true;
  }
  tried_ = place_.at;
  return place_.within && place_.at < place_.end;
}

absl::string_view TextReader::Begin() {
  const bool there = NextWord();
  const absl::string_view rest = text_.substr(place_.at, place_.end - place_.at);
  return there ? rest.substr(0, rest.find(' ')) : "";
}

void TextReader::Skip(size_t characters) {
  place_.at += characters;
  place_.within = false;
}

bool TextReader::End() {
  return (!NextWord() && place_.at == place_.end) || Expected("the end of the line");
}

bool TextReader::Word(absl::string_view* word) {
  *word = Begin();
  Skip(word->size());
  return !word->empty() || Expected("a word");
}

bool TextReader::TakeWord(absl::string_view word) {
  if (Begin() != word) return false;
  Skip(word.size());
  return true;
}

bool TextReader::Take(absl::string_view text) {
  tried_ = place_.at;
  if (!Follows(text)) return false;
  place_.at += text.size();
  place_.within = true;
  return true;
}

absl::string_view TextReader::Rest() {
  NextWord();
  const absl::string_view rest = text_.substr(place_.at, place_.end - place_.at);
  Skip(rest.size());
  return rest;
}

bool TextReader::ReadInteger(int64_t least, int64_t most, int64_t* number) {
  const absl::string_view word = Begin();
  const size_t first = absl::StartsWith(word, "-") ? 1 : 0;
  const size_t size = std::min(word.find_first_not_of("0123456789", first), word.size());
  if (!absl::SimpleAtoi(word.substr(0, size), number) || *number < least || *number > most) {
    return Expected(most < least ? "nothing, since there is nothing to refer to"
                                 : absl::StrCat("an integer from ", least, " to ", most));
  }
  Skip(size);
  return true;
}

bool TextReader::Real(double* number) {
  const absl::string_view word = Begin();
  if (!absl::SimpleAtod(word, number)) return Expected("a number");
  Skip(word.size());
  return true;
}

bool TextReader::Expected(absl::string_view what) {
  if (place_.line == 0 || place_.begin == text_.size()) {
    return Fail(absl::StrCat("expected ", what, ", found the end of the text"));
  }
  int word = 1;
  for (size_t i = place_.begin + indent_.size(); i < tried_; ++i) {
    word += text_[i] == ' ' && i + 1 < place_.end && text_[i + 1] != ' ';
  }
  const absl::string_view rest = text_.substr(tried_, place_.end - tried_);
  return Fail(
      absl::StrCat("expected ", what, " at line ", place_.line, " word ", word, ", found ",
                   rest.empty() ? "the end of the line" : Quoted(rest.substr(0, rest.find(' '))),
                   " in ", Quoted(LineText())));
}

std::string TextReader::Quoted(absl::string_view text) {
  return absl::StrCat("'", absl::Utf8SafeCHexEscape(text.substr(0, kMostShown)), "'");
}

absl::string_view TextReader::LineText() const {
  const size_t first = place_.begin + indent_.size();
  return text_.substr(first, place_.end - first);
}

std::string TextReader::Line() const {
  if (place_.line == 0 || place_.begin == text_.size()) return "";
  return absl::StrCat("line ", place_.line, " ", Quoted(LineText()), ": ");
}

bool TextReader::Fail(absl::string_view message) {
  if (status_.ok()) {
    status_ = absl::InvalidArgumentError(absl::StrCat(what_, ": ", message, advice_));
  }
  return false;
}

absl::Status TextReader::failure() const {
  return status_.ok() ? absl::InvalidArgumentError(absl::StrCat(what_, ": cannot be read", advice_))
                      : status_;
}

}  // namespace tfmem
