// The table of places and the lists that a batch sends to a GPU.
#include "custom_ops/ops/dynamic/gpu_script.h"

namespace tfmem {
namespace {

// The table and the lists. The order is that of custom_ops/dynamic/codegen/batch_table.py.
class Tables {
 public:
  Tables(const DynamicSpec& spec, const GpuProgram& program, const DynamicBatch& batch,
         const DynamicLayout& layout, const std::vector<LookedUp>& looked_up, GpuSent* sent)
      : spec_(spec), program_(program), batch_(batch), layout_(layout), sent_(*sent) {
    // The table, and behind it where each processor's script begins.
    sent_.words.resize(program.table + program.processors + 1);
    sent_.floats = layout.floats;
    Types();
    Kinds();
    for (size_t i = 0; i < looked_up.size(); ++i) LookUps(looked_up[i]);
    std::vector<uint32_t> first(batch.first_of.begin(), batch.first_of.end());
    Word(List(first));
    std::vector<uint32_t> losses;
    for (int64_t node = 0; node < batch.nodes; ++node) {
      const int64_t place = layout.losses[batch.kind_of[node]];
      losses.push_back(place < 0 ? kNowhere : place + batch.row_of[node]);
    }
    Word(List(losses));
  }

 private:
  void Word(int64_t value) { sent_.words[next_++] = static_cast<uint32_t>(value); }

  template <typename Values>
  int64_t List(const Values& values) {
    const int64_t at = sent_.words.size();
    sent_.words.insert(sent_.words.end(), values.begin(), values.end());
    return at;
  }

  // Positions of puts come behind those of types, so they are counted first.
  std::vector<std::vector<int64_t>> PutWords() const {
    std::vector<std::vector<int64_t>> found;
    int64_t at = 0;
    for (const auto& widths : spec_.types) at += widths.size() + 2;
    for (size_t i = 0; i < spec_.kinds.size(); ++i) {
      const DynamicKind& kind = spec_.kinds[i];
      at += 4 + kind.children.size() + kind.arguments.size() + kind.kept.size() +
            program_.spilled[i].size() + kind.outputs.size();
      found.emplace_back();
      for (int child : kind.children) {
        found.back().push_back(at);
        at += spec_.types[child].size();
      }
      ++at;
    }
    return found;
  }

  void Types() {
    const std::vector<std::vector<int64_t>> puts = PutWords();
    for (size_t type = 0; type < spec_.types.size(); ++type) {
      for (int64_t place : layout_.states[type]) Word(place);
      const TypeRows& rows = batch_.types[type];
      Word(List(rows.first_parent));
      std::vector<uint32_t> parents;
      for (const ParentEntry& parent : rows.parents) {
        parents.push_back(puts[parent.kind][parent.slot]);
        parents.push_back(parent.row);
      }
      Word(List(parents));
    }
  }

  void Kinds() {
    for (size_t i = 0; i < spec_.kinds.size(); ++i) {
      const KindRows& rows = batch_.kinds[i];
      Word(rows.count);
      Word(List(rows.nodes));
      Word(List(rows.examples));
      Word(List(rows.states));
      for (const auto& child : rows.children) Word(List(child));
      for (const auto& argument : rows.arguments) Word(List(argument));
      for (int64_t place : layout_.kept[i]) Word(place);
      for (int64_t width : program_.spilled[i]) {
        Word(sent_.floats);
        sent_.floats = (sent_.floats + AlignedFloats(rows.count, width)).value();
      }
      for (int64_t place : layout_.outputs[i]) Word(place);
      for (const auto& child : layout_.children[i]) {
        for (int64_t place : child) Word(place < 0 ? int64_t{kNowhere} : place);
      }
      Word(layout_.losses[i] < 0 ? int64_t{kNowhere} : layout_.losses[i]);
    }
  }

  void LookUps(const LookedUp& table) {
    std::vector<uint32_t> rows, entries;
    for (int64_t row = 0; row < table.rows(); ++row) {
      rows.push_back(table.entries[table.first[row]].row);
    }
    for (const LookedUp::Entry& entry : table.entries) {
      const DynamicStep& step = spec_.kinds[entry.kind].sections[kGradients][entry.step];
      const int64_t place = layout_.kept[entry.kind][step.values[0].number];
      entries.push_back(place + entry.node * StrideOf(step.width));
      entries.push_back(step.numbers[2]);
      entries.push_back(step.width);
    }
    sent_.looked_up.push_back(List(rows));
    Word(sent_.looked_up.back());
    Word(List(table.first));
    Word(List(entries));
  }

  const DynamicSpec& spec_;
  const GpuProgram& program_;
  const DynamicBatch& batch_;
  const DynamicLayout& layout_;
  GpuSent& sent_;
  int64_t next_ = 0;
};

}  // namespace

void WriteGpuTables(const DynamicSpec& spec, const GpuProgram& program, const DynamicBatch& batch,
                    const DynamicLayout& layout, const std::vector<LookedUp>& looked_up,
                    GpuSent* sent) {
  Tables(spec, program, batch, layout, looked_up, sent);
}

}  // namespace tfmem
