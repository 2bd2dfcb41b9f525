#include "custom_ops/extension/replay.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "custom_ops/extension/free_chunks.h"

namespace tfmem {
namespace {

constexpr int64_t kMostElements = 64;

struct Buffer {
  int64_t nbytes, start, end, element, twice, between;
};

struct Move {
  int64_t buffer, release, prefetch, recomputed;
  int64_t temporary, workspace;  // bytes that recomputing takes beside the buffer
};

struct Padding {
  int64_t position, nbytes;
};

struct Step {
  std::vector<Buffer> buffers;
  std::vector<int64_t> workspace;  // of each position
  std::vector<Move> moves;
  std::vector<Padding> paddings;
  std::vector<Chunk> free;
  double spare;
  int64_t smallest;
};

// Numbers by position, each position's in the order in which they were given.
class Table {
 public:
  explicit Table(int64_t positions) : first_(positions + 1), last_(positions, -1) {
    std::fill(first_.begin(), first_.end(), -1);
  }
  void Add(int64_t position, int64_t number) {
    const auto entry = static_cast<int64_t>(numbers_.size());
    (first_[position] < 0 ? first_[position] : next_[last_[position]]) = entry;
    last_[position] = entry;
    numbers_.push_back(number);
    next_.push_back(-1);
  }
  int64_t First(int64_t position) const { return first_[position]; }
  int64_t Next(int64_t entry) const { return next_[entry]; }
  int64_t operator[](int64_t entry) const { return numbers_[entry]; }

 private:
  std::vector<int64_t> first_, last_, numbers_, next_;
};

struct Held {
  bool there = false;
  int64_t order = 0;  // of allocation
  Chunk chunk;
  int64_t position = 0, split = 0;  // when it was allocated, and in a free chunk of what size
  std::vector<Chunk> elements;      // of a list
};

enum class End { kRan, kNoRoom, kError };

struct Failure {
  int64_t position, wanted, short_of, made;
  bool workspace;
};

class Replay {
 public:
  Replay(const Step& step, PyObject* excused, int64_t positions)
      : step_(step),
        excused_(excused),
        starts_(positions),
        ends_(positions),
        releases_(positions),
        paddings_(positions),
        prefetches_(positions),
        again_(positions),
        held_(step.buffers.size()),
        positions_(positions) {
    for (const Chunk& chunk : step.free) free_.Add(chunk);
    for (size_t i = 0; i < step.buffers.size(); ++i) {
      if (step.buffers[i].nbytes < step.smallest) continue;
      starts_.Add(step.buffers[i].start, i);
      ends_.Add(step.buffers[i].end, i);
    }
    for (size_t i = 0; i < step.moves.size(); ++i) {
      const Move& move = step.moves[i];
      if (step.buffers[move.buffer].nbytes < step.smallest) continue;
      if (move.release >= move.prefetch && !move.recomputed) continue;
      releases_.Add(move.release, move.buffer);
      if (move.recomputed) {
        again_.Add(move.prefetch, i);
      } else {
        prefetches_.Add(move.prefetch, move.buffer);
      }
    }
    for (const Padding& padding : step.paddings) paddings_.Add(padding.position, padding.nbytes);
  }

  End Run(int64_t until) {
    const int64_t end = std::min(until, positions_);
    for (position_ = 0; position_ < end; ++position_) {
      const End ended = Happen();
      if (ended != End::kRan) return ended;
    }
    return End::kRan;
  }

  const Failure& failure() const { return failure_; }
  const std::vector<int64_t>& missed() const { return missed_; }
  // Indices of the buffers in memory that are no lists, in the order of their allocation.
  std::vector<int64_t> InMemory() const {
    std::vector<int64_t> found;
    for (size_t i = 0; i < held_.size(); ++i) {
      if (held_[i].there && step_.buffers[i].element == 0) found.push_back(i);
    }
    std::sort(found.begin(), found.end(),
              [this](int64_t a, int64_t b) { return held_[a].order < held_[b].order; });
    return found;
  }
  const Held& held(int64_t index) const { return held_[index]; }

 private:
  End Happen() {
    made_ = 0;
    End ended = End::kRan;
    for (int64_t i = releases_.First(position_); i >= 0; i = releases_.Next(i)) {
      if ((ended = Drop(releases_[i])) != End::kRan) return ended;
    }
    std::vector<Chunk> full;
    for (int64_t i = paddings_.First(position_); i >= 0; i = paddings_.Next(i)) {
      full.emplace_back();
      if (!Allocate(paddings_[i], &full.back())) return End::kNoRoom;
    }
    for (int64_t i = prefetches_.First(position_); i >= 0; i = prefetches_.Next(i)) {
      if (!Hold(prefetches_[i])) return End::kNoRoom;
    }
    for (int64_t i = again_.First(position_); i >= 0; i = again_.Next(i)) {
      if ((ended = Recompute(step_.moves[again_[i]])) != End::kRan) return ended;
    }
    std::vector<int64_t> outputs;
    for (int64_t i = starts_.First(position_); i >= 0; i = starts_.Next(i)) {
      outputs.push_back(starts_[i]);
    }
    const bool runs = position_ < static_cast<int64_t>(step_.workspace.size());
    ended = Compute(outputs, runs ? step_.workspace[position_] : 0);
    for (int64_t i = ends_.First(position_); ended == End::kRan && i >= 0; i = ends_.Next(i)) {
      ended = Drop(ends_[i]);
    }
    for (const Chunk& chunk : full) {
      if (ended == End::kRan) free_.Free(chunk);
    }
    return ended;
  }

  // Runs a chain; its temporary tensors are taken to lie in one piece.
  End Recompute(const Move& move) {
    Chunk temporary;
    const bool takes = move.temporary >= step_.smallest;
    if (takes && !Allocate(move.temporary, &temporary)) return End::kNoRoom;
    const End ended = Compute({move.buffer}, move.workspace);
    if (takes && ended == End::kRan) free_.Free(temporary);
    return ended;
  }

  bool Hold(int64_t index) {
    const Buffer& buffer = step_.buffers[index];
    Held& held = held_[index];
    if (buffer.element > 0) {
      const int64_t count = std::min(kMostElements, buffer.nbytes / buffer.element);
      std::vector<Chunk> elements(count);
      for (Chunk& chunk : elements) {
        if (!Allocate(buffer.nbytes / count, &chunk)) return false;
      }
      held.elements = std::move(elements);
    } else {
      Chunk chunk;
      if (!Allocate(buffer.nbytes, &chunk)) return false;
      held.chunk = chunk;
      held.position = position_;
      held.split = free_.split();
    }
    if (!held.there) held.order = ++allocated_;
    held.there = true;
    return true;
  }

  End Drop(int64_t index) {
    Held& held = held_[index];
    if (!held.there) {
      PyErr_Format(PyExc_ValueError,
                   "buffer %lld is to be freed at position %lld, where it is not in memory; "
                   "a buffer may have only one move in each of its gaps",
                   static_cast<long long>(index), static_cast<long long>(position_));
      return End::kError;
    }
    held.there = false;
    if (step_.buffers[index].element == 0) {
      free_.Free(held.chunk);
    } else {
      for (const Chunk& chunk : held.elements) free_.Free(chunk);
    }
    return End::kRan;
  }

  // An op that makes buffers.
  End Compute(const std::vector<int64_t>& outputs, int64_t workspace) {
    std::vector<std::pair<int64_t, Chunk>> seconds;
    std::vector<Chunk> borrowed;
    for (const int64_t index : outputs) {
      const Buffer& buffer = step_.buffers[index];
      if (!Hold(index)) return End::kNoRoom;
      if (!buffer.twice || buffer.element > 0 || workspace < buffer.nbytes + buffer.between)
        continue;
      workspace -= buffer.nbytes + buffer.between;
      Chunk chunk;
      if (buffer.between >= step_.smallest) {
        if (!Allocate(buffer.between, &chunk)) return End::kNoRoom;
        borrowed.push_back(chunk);
      }
      if (!Allocate(buffer.nbytes, &chunk)) return End::kNoRoom;
      seconds.emplace_back(index, chunk);
    }
    if (workspace >= step_.smallest) {
      const End ended = Borrow(static_cast<int64_t>(step_.spare * static_cast<double>(workspace)));
      if (ended != End::kRan) return ended;
    }
    for (const auto& [index, second] : seconds) {
      free_.Free(held_[index].chunk);
      held_[index].chunk = second;
    }
    for (const Chunk& chunk : borrowed) free_.Free(chunk);
    return End::kRan;
  }

  bool Allocate(int64_t nbytes, Chunk* chunk) {
    if (!free_.Allocate(nbytes, chunk)) {
      Fail(nbytes, false);
      return false;
    }
    ++made_;
    return true;
  }

  void Fail(int64_t nbytes, bool workspace) {
    failure_ = {position_, nbytes, nbytes - free_.Largest(), made_, workspace};
  }

  // Allocates and frees at once, which leaves the free chunks unchanged.
  End Borrow(int64_t nbytes) {
    if (nbytes <= free_.Largest()) {
      ++made_;
      return End::kRan;
    }
    PyObject* position = PyLong_FromLongLong(position_);
    const int excused = position == nullptr ? -1 : PySequence_Contains(excused_, position);
    Py_XDECREF(position);
    if (excused < 0) return End::kError;
    if (excused) {
      missed_.push_back(position_);
      return End::kRan;
    }
    Fail(nbytes, true);
    return End::kNoRoom;
  }

  const Step& step_;
  PyObject* excused_;
  Table starts_, ends_, releases_, paddings_, prefetches_, again_;
  std::vector<Held> held_;
  FreeChunks free_;
  std::vector<int64_t> missed_;
  Failure failure_ = {};
  int64_t positions_, position_ = 0, made_ = 0, allocated_ = 0;
};

template <typename T>
bool ReadRows(PyObject* bytes, const char* what, std::vector<T>* rows) {
  char* data;
  Py_ssize_t length;
  if (PyBytes_AsStringAndSize(bytes, &data, &length) < 0) return false;
  if (length % sizeof(T) != 0) {
    PyErr_Format(PyExc_ValueError, "%zd bytes of %s; expected a multiple of %zd", length, what,
                 static_cast<Py_ssize_t>(sizeof(T)));
    return false;
  }
  rows->resize(length / sizeof(T));
  if (length > 0) std::memcpy(rows->data(), data, length);
  return true;
}

// One more than the last position, or -1 with an error set.
int64_t CountPositions(const Step& step) {
  auto last = static_cast<int64_t>(step.workspace.size()) - 1;
  int64_t first = 0;
  const auto ops = static_cast<int64_t>(step.workspace.size());
  bool exists = true;
  for (const Buffer& buffer : step.buffers) {
    exists = exists && buffer.start >= 0 && buffer.start < ops && buffer.end < ops;
    first = std::min(first, buffer.end);
  }
  for (const Move& move : step.moves) {
    exists = exists && move.buffer >= 0 &&
             move.buffer < static_cast<int64_t>(step.buffers.size()) && move.release <= ops &&
             move.prefetch <= ops;
    first = std::min({first, move.release, move.prefetch});
    last = std::max({last, move.release, move.prefetch});
  }
  for (const Padding& padding : step.paddings) {
    exists = exists && padding.position <= ops;
    first = std::min(first, padding.position);
    last = std::max(last, padding.position);
  }
  if (exists && first >= 0) return last + 1;
  PyErr_Format(PyExc_ValueError,
               "a buffer, move or padding is at a position, or of a buffer, that the step of %lld "
               "ops and %zd buffers does not have",
               static_cast<long long>(ops), static_cast<Py_ssize_t>(step.buffers.size()));
  return -1;
}

PyObject* Numbers(const std::vector<int64_t>& numbers) {
  Reference list(PyList_New(static_cast<Py_ssize_t>(numbers.size())));
  for (size_t i = 0; list && i < numbers.size(); ++i) {
    PyObject* number = PyLong_FromLongLong(numbers[i]);
    if (number == nullptr) return nullptr;
    PyList_SetItem(list.get(), static_cast<Py_ssize_t>(i), number);
  }
  return list.release();
}

PyObject* Result(const Replay& replay, End ended) {
  std::vector<int64_t> held;
  for (const int64_t index : replay.InMemory()) {
    const Held& item = replay.held(index);
    held.insert(held.end(),
                {index, item.chunk.address, item.chunk.size, item.position, item.split});
  }
  Reference failure = Reference::To(Py_None);
  if (ended == End::kNoRoom) {
    const Failure& found = replay.failure();
    failure = Reference(
        Py_BuildValue("(LLLLN)", static_cast<long long>(found.position),
                      static_cast<long long>(found.wanted), static_cast<long long>(found.short_of),
                      static_cast<long long>(found.made), PyBool_FromLong(found.workspace)));
  }
  Reference in_memory(Numbers(held)), missed(Numbers(replay.missed()));
  if (!failure || !in_memory || !missed) return nullptr;
  return Py_BuildValue("(NNN)", failure.release(), in_memory.release(), missed.release());
}

}  // namespace

const char kReplayStep[] =
    "replay_step(buffers, workspace, moves, paddings, chunks, spare, smallest, excused, until, /)\n"
    "--\n\n"
    "Allocates and frees what a step does, up to a position. Tables are bytes of 64-bit integers.";

PyObject* ReplayStep(PyObject*, PyObject* args) {
  PyObject *buffers, *workspace, *moves, *paddings, *chunks, *excused;
  double spare;
  long long smallest, until;
  if (!PyArg_ParseTuple(args, "OOOOOdLOL:replay_step", &buffers, &workspace, &moves, &paddings,
                        &chunks, &spare, &smallest, &excused, &until)) {
    return nullptr;
  }
  return Guarded([&]() -> PyObject* {
    Step step;
    step.spare = spare;
    step.smallest = smallest;
    if (!ReadRows(buffers, "buffers", &step.buffers) ||
        !ReadRows(workspace, "workspace", &step.workspace) ||
        !ReadRows(moves, "moves", &step.moves) || !ReadRows(paddings, "paddings", &step.paddings) ||
        !ReadRows(chunks, "chunks", &step.free)) {
      return nullptr;
    }
    const int64_t positions = CountPositions(step);
    if (positions < 0) return nullptr;
    Replay replay(step, excused, positions);
    const End ended = replay.Run(until);
    return ended == End::kError ? nullptr : Result(replay, ended);
  });
}

}  // namespace tfmem
