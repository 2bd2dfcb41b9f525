// Mutations of valid texts, and what else programs that fuzz have in common.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace {

std::mt19937_64 random_source;
std::string current;
int64_t inputs_done = 0;

int64_t Random(int64_t end) { return random_source() % std::max<int64_t>(end, 1); }

template <typename T>
const T& OneOf(const std::vector<T>& from) {
  return from[Random(from.size())];
}

void PrintInput() {
  std::fprintf(stderr, "input %ld:\n%s\n", static_cast<long>(inputs_done), current.c_str());
}

void Expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what);
  PrintInput();
  std::exit(1);
}

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

// The last but one is empty.
const std::vector<std::string> kNumbers = Split(
    "0 1 2 3 5 -1 64 255 1000000 2147483646 2147483647 2147483648 4294967295 4294967296 1e9 nan -0 "
    "4611686018427387905 9223372036854775807 9223372036854775808 18446744073709551617 +1 0x10  1.5",
    ' ');

const std::vector<std::string> kWords = {
    "sequences", "invariants", "vectors",     "matrices", "states",    "output",    "constant",
    "sequence",  "invariant",  "vector",      "state",    "product",   "row_sum",   "add",
    "select",    "tanh",       "multiply",    "greater",  "cell",      "program",   "rows",
    "ctas",      "cluster",    "threads",     "shared",   "scratch",   "stages",    "arch",
    "kind",      "max_batch",  "cooperative", "kernel",   "digest",    "entry",     "axes",
    "tensor",    "input",      "position",    "cast",     "reduce",    "sum",       "max",
    "mean",      "any",        "float16",     "int64",    "bool",      "a0",        "2*a1+1",
    "child",     "lookup",     "row",         "one_hot",  "random",    "broadcast", "concat",
    "slice",     "reduce_sum", "reduce_max",  "adjoint",  "put_state", "put_loss",  "put_child",
    "outer",     "column_sum", "put_lookup",  "section",  "k0",        "s0",        "s1",
    "c0",        "-",          "|",           "n2",       "a0+n3",     "a0/2%2",    "-1*a1+3",
    "float64",   "uint64"};

std::string Join(const std::vector<std::string>& parts, char separator) {
  std::string text;
  for (const std::string& part : parts) text += part + separator;
  return text;
}

void MutateWord(std::string* line) {
  std::vector<std::string> words = Split(*line, ' ');
  if (words.empty()) return;
  const int64_t place = Random(words.size());
  switch (Random(6)) {
    case 0:
      words[place] = OneOf(kWords);
      break;
    case 1:
      words.insert(words.begin() + place, OneOf(kNumbers));
      break;
    case 2:
      words.erase(words.begin() + place);
      break;
    case 3:
      words[place] = OneOf(kNumbers);
      break;
    default:  // most often near what is right
      if (place > 0) words[place] = std::to_string(Random(24));
  }
  *line = Join(words, ' ');
  if (!line->empty()) line->pop_back();
}

std::string Mutate(std::string text, const std::vector<std::string>& others) {
  for (int64_t count = Random(4) + 1; count > 0; --count) {
    std::vector<std::string> lines = Split(text, '\n');
    if (lines.empty()) return text;
    const int64_t place = Random(lines.size()), other = Random(lines.size());
    switch (Random(9)) {
      case 0:
        lines.insert(lines.begin() + other, lines[place]);
        break;
      case 1:
        lines.erase(lines.begin() + place);
        break;
      case 2:
        std::swap(lines[place], lines[other]);
        break;
      case 3: {
        const std::vector<std::string> foreign = Split(OneOf(others), '\n');
        if (!foreign.empty()) lines.insert(lines.begin() + place, OneOf(foreign));
        break;
      }
      case 4:
        if (!lines[place].empty()) {
          lines[place][Random(lines[place].size())] = static_cast<char>(Random(256));
        }
        break;
      case 5:
        if (Random(8) == 0) lines.resize(place);
        break;
      default:
        MutateWord(&lines[place]);
    }
    text = Join(lines, '\n');
  }
  return text;
}

}  // namespace
