// Reads text in lines of words: the attributes that describe cells, programs, regions, kinds of
// nodes and kernels. An error names the line and the word. Knows nothing of what the text means.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace tfmem {

// A cursor over text of any origin. A function that reads returns whether the text goes on as
// expected; the first failure is kept with its place. So a parser is a chain of &&, and its caller
// asks for `failure` once. What could not be read is not to be used.
class TextReader {
 public:
  // `what` opens each error, `advice` ends it. All three outlive the reader.
  TextReader(absl::string_view what, absl::string_view text, absl::string_view advice = "")
      : what_(what), text_(text), advice_(advice) {}

  // The first line, which is the format's name and version.
  bool Format(absl::string_view format);
  // Goes to the next line that is not empty. False at the end of the text, or of the lines that
  // begin with the indent, which is no failure.
  bool NextLine();
  void set_indent(absl::string_view indent) { indent_ = indent; }

  // Goes to the next word. False behind the last one, which is no failure.
  bool NextWord();
  // The line ends here.
  bool End();
  bool Word(absl::string_view* word);
  // The next word is this one.
  bool Key(absl::string_view word) { return TakeWord(word) || Expected(Quoted(word)); }
  // Reads `word` if it is the next one; else nothing, which is no failure.
  bool TakeWord(absl::string_view word);
  // Within a word: reads `text` if it comes next; else nothing, which is no failure.
  bool Take(absl::string_view text);
  bool Follows(absl::string_view text) const {
    return text_.substr(place_.at, place_.end - place_.at).substr(0, text.size()) == text;
  }
  bool Separator(absl::string_view text) { return Take(text) || Expected(Quoted(text)); }
  // The rest of the line, as it is.
  absl::string_view Rest();

  // An integer, from a word or from a part of one.
  template <typename Integer>
  bool Number(int64_t least, int64_t most, Integer* number) {
    int64_t found = 0;
    if (!ReadInteger(least, most, &found)) return false;
    *number = static_cast<Integer>(found);
    return true;
  }
  // A number below `end`: a reference to one of so many things.
  template <typename Integer>
  bool Below(size_t end, Integer* number) {
    return Number(0, static_cast<int64_t>(end) - 1, number);
  }
  // Integers up to the end of the line, at most `count` of them.
  template <typename Integer>
  bool Numbers(int64_t least, int64_t most, std::vector<Integer>* numbers,
               size_t count = std::numeric_limits<size_t>::max()) {
    while (NextWord()) {
      if (numbers->size() == count) return Expected(absl::StrCat("at most ", count, " numbers"));
      if (!Number(least, most, &numbers->emplace_back())) return false;
    }
    return End();
  }
  bool Real(double* number);
  // One of an enum's values from 0 to `last`, by its name.
  template <typename Enum>
  bool Name(absl::string_view expected, Enum last, Enum* found) {
    absl::string_view word;
    if (!Word(&word)) return false;
    for (int i = 0; i <= static_cast<int>(last); ++i) {
      *found = static_cast<Enum>(i);
      if (word == NameOf(*found)) return true;
    }
    return Expected(expected);
  }

  // Fails: what was read or tried last is not what was expected.
  bool Expected(absl::string_view what);
  // Fails: the line can be read, but cannot be right.
  template <typename... Parts>
  bool Wrong(const Parts&... parts) {
    return Fail(absl::StrCat(Line(), parts...));
  }
  // Why something was not as expected; asked for once a function has failed, or to see whether.
  const absl::Status& status() const { return status_; }
  absl::Status failure() const;

  // A place to return to.
  struct Place {
    size_t begin = 0, end = 0, at = 0;
    int line = 0;
    bool within = false;
  };
  const Place& place() const { return place_; }
  void GoTo(const Place& place) { place_ = place; }

 private:
  static std::string Quoted(absl::string_view text);
  bool ReadInteger(int64_t least, int64_t most, int64_t* number);
  absl::string_view Begin();  // what is left of the word that comes next
  void Skip(size_t characters);
  bool Fail(absl::string_view message);
  absl::string_view LineText() const;
  std::string Line() const;  // as an error about all of it opens

  absl::string_view what_, text_, advice_, indent_;
  Place place_;       // `within`: a word, or a part of one, begins here
  size_t tried_ = 0;  // where that begins which was read or tried last
  absl::Status status_;
};

}  // namespace tfmem
