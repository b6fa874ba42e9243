// State rows in the host's memory, for drivers in Python: one call here replaces several operator
// calls, which would cost more than their work, and returns plain numbers.
#include "host_rounds.hpp"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "polyspec/round_state.hpp"

namespace py = pybind11;
using polyspec::RoundShape;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

void require(const polyspec::Result& result) {
  if (!result.ok()) throw std::invalid_argument(result.message);
}

// A step that is due for some rows of the batch.
struct HostStep {
  uint64_t number = 0;  // no other step has it
  int32_t level = 0;
  int64_t most = 0;            // the largest of `lengths`
  int64_t lag = 0;             // no row has more tokens to read before these
  bool last = true;            // the wanted logits follow the last of [t] tokens in all rows
  bool even = true;            // all of `lengths` are `most`
  bool tail = false;           // some row drafts a tail
  std::vector<int64_t> group;  // rows with a part
  // [b] each, see SchedulePlan
  std::vector<int64_t> counts, first, lengths, positions, rounds;
  Array<int64_t> input_ids;  // [b, t]
  Array<int64_t> pending;    // [b, most], the tokens to verify among these
};

using Entry = std::array<int64_t, RoundShape::kPerStep>;

// The outcome of a step.
struct HostReport {
  std::vector<Entry> entries;              // [b], see RoundShape::Log
  std::vector<std::vector<int64_t>> kept;  // [n, b]
  std::vector<int32_t> cut;                // levels with more cached in some row
  int64_t status = 0;                      // bits of all entries
  Array<int64_t> appended;                 // [2, b]
};

class HostRounds {
 public:
  HostRounds(RoundShape shape, Array<int64_t> words, Array<int64_t> eos)
      : shape_(shape), words_(std::move(words)), eos_(std::move(eos)) {
    polyspec::ScheduleDueParams none;
    none.in.shape = shape_;
    require(polyspec::schedule_due(none));
    if (shape_.steps < 1)
      throw std::invalid_argument("steps: expected >= 1, given " + std::to_string(shape_.steps));
    if (words_.ndim() != 2 || words_.shape(1) != shape_.words())
      throw std::invalid_argument("words: expected shape [B, " + std::to_string(shape_.words()) +
                                  "]");
    if (eos_.ndim() != 2 || eos_.shape(0) != words_.shape(0))
      throw std::invalid_argument("eos: expected shape [" + std::to_string(batch()) + ", E]");
    due_.resize(2 * batch());
    none_.resize(batch());
    plan_ = Array<int64_t>({static_cast<int64_t>(polyspec::kPlanRows), batch()});
    std::fill_n(plan_.mutable_data(), plan_.size(), 0);
  }

  // Of the last step of `next`, [kPlanRows, b]: one table, which every step overwrites, so that a
  // reader wraps it once.
  const Array<int64_t>& plan() const { return plan_; }

  // Drafts first, then the deepest verification, so that late rows find the others at the same
  // level. A draft reads from position `unread` [b] on, or an earlier one.
  std::optional<HostStep> next(const std::optional<Array<int64_t>>& unread) {
    if (unread && unread->size() != batch())
      throw std::invalid_argument("unread: expected shape [" + std::to_string(batch()) + "]");
    polyspec::ScheduleDueParams due;
    due.in = rounds();
    due.due = due_.data();
    require(polyspec::schedule_due(due));
    HostStep step;
    const int64_t b = batch();
    for (int64_t row = 0; row < b; ++row) {
      step.level = std::max(step.level, static_cast<int32_t>(due_[row]));
    }
    if (step.level == 0) return std::nullopt;
    int64_t width = 1;
    for (int64_t row = 0; row < b; ++row) {
      if (due_[row] != step.level) continue;
      step.group.push_back(row);
      const int64_t* words = this->words(row);
      const int64_t total = words[RoundShape::kTotal];
      int64_t cached = words[shape_.level_at(step.level) + RoundShape::kCached];
      if (unread && step.level == shape_.levels) cached = std::min(cached, unread->data()[row]);
      if (cached < 0 || cached > total || total > shape_.capacity) {
        throw std::invalid_argument(
            "words: expected 0 <= cached <= total <= " + std::to_string(shape_.capacity) +
            " in row " + std::to_string(row) + ", given " + std::to_string(cached) + " and " +
            std::to_string(total));
      }
      width = std::max(width, total - cached);
      step.most = std::max(step.most, due_[b + row]);
    }
    step.input_ids = Array<int64_t>({b, width});
    polyspec::ScheduleNextParams next;
    next.in = due.in;
    next.level = step.level;
    next.width = width;
    next.input_ids = step.input_ids.mutable_data();
    next.plan = plan_.mutable_data();
    if (step.level == shape_.levels) {
      next.unread = unread ? unread->data() : nullptr;
    } else {
      step.pending = Array<int64_t>({b, step.most});
      next.most = step.most;
      next.pending = step.pending.mutable_data();
    }
    require(polyspec::schedule_next(next));
    for (const int64_t row : step.group) {
      if (next.plan[polyspec::kPlanPart * b + row] == 0) {
        throw std::invalid_argument("words: expected those of a step in row " +
                                    std::to_string(row) + ", given counts that cannot be");
      }
    }
    const auto row_of = [&](polyspec::SchedulePlan field) {
      return std::vector<int64_t>(next.plan + field * b, next.plan + (field + 1) * b);
    };
    step.counts = row_of(polyspec::kPlanCounts);
    step.first = row_of(polyspec::kPlanFirst);
    step.lengths = row_of(polyspec::kPlanLengths);
    step.positions = row_of(polyspec::kPlanPositions);
    step.rounds = row_of(polyspec::kPlanRounds);
    for (int64_t row = 0; row < b; ++row) {
      step.lag = std::max(step.lag, step.counts[row] - step.lengths[row]);
      step.last &= step.counts[row] == width && step.first[row] == width - step.most - 1;
      step.even &= step.lengths[row] == step.most;
      step.tail |= step.level == shape_.levels && next.plan[polyspec::kPlanOfTail * b + row] > 0;
    }
    step.number = due_number_ = new_number();
    return step;
  }

  HostReport report(const HostStep& step, const Array<int64_t>& tokens,
                    const std::optional<Array<int64_t>>& counts,
                    const std::optional<Array<int32_t>>& status, bool ends) {
    const int64_t b = batch();
    if (step.number != due_number_)
      throw std::invalid_argument("step: expected the one that `next` of this object gave last");
    if (tokens.ndim() != 2 || tokens.shape(0) != b || tokens.shape(1) < 1)
      throw std::invalid_argument("tokens: expected shape [" + std::to_string(b) + ", W]");
    const int64_t width = tokens.shape(1);
    if (counts && counts->size() != b)
      throw std::invalid_argument("counts: expected shape [" + std::to_string(b) + "]");
    const int64_t statuses = step.level == shape_.levels ? b * width : b;
    if (status && status->size() != statuses)
      throw std::invalid_argument("status: expected " + std::to_string(statuses) + " values");
    if (!status && static_cast<int64_t>(none_.size()) < statuses) none_.resize(statuses);
    polyspec::ScheduleReportParams report;
    report.in = rounds();
    report.level = step.level;
    report.plan = plan_.data();
    report.width = width;
    report.tokens = tokens.data();
    report.counts = counts ? counts->data() : nullptr;
    report.status = status ? status->data() : none_.data();
    report.num_eos = ends ? eos_.shape(1) : 0;
    report.eos = eos_.data();
    HostReport made;
    made.appended = Array<int64_t>({int64_t{2}, b});
    report.appended = made.appended.mutable_data();
    std::vector<std::vector<int64_t>> held = cached();
    for (int64_t row = 0; row < b; ++row) held[step.level - 1][row] += step.counts[row];
    require(polyspec::schedule_report(report));
    due_number_ = new_number();
    made.entries.resize(b);
    for (int64_t row = 0; row < b; ++row) {
      int64_t* words = this->words(row);
      words[RoundShape::kStep] = 0;
      std::copy_n(words + shape_.log_at(), made.entries[row].size(), made.entries[row].begin());
      if (made.entries[row][RoundShape::kCount] >= 0)
        made.status |= made.entries[row][RoundShape::kStatus];
    }
    made.kept = cached();
    for (int32_t level = step.level; level <= shape_.levels; ++level) {
      bool more = false;
      for (int64_t row = 0; row < b; ++row) {
        more |= held[level - 1][row] > made.kept[level - 1][row];
      }
      if (more) made.cut.push_back(level);
    }
    return made;
  }

 private:
  static uint64_t new_number() {
    static std::atomic<uint64_t> last{0};
    return ++last;
  }
  int64_t batch() const { return words_.shape(0); }
  int64_t* words(int64_t row) { return words_.mutable_data() + row * shape_.words(); }
  std::vector<std::vector<int64_t>> cached() {  // [n, b]
    std::vector<std::vector<int64_t>> made(shape_.levels, std::vector<int64_t>(batch()));
    for (int32_t level = 1; level <= shape_.levels; ++level) {
      for (int64_t row = 0; row < batch(); ++row) {
        made[level - 1][row] = words(row)[shape_.level_at(level) + RoundShape::kCached];
      }
    }
    return made;
  }
  polyspec::RoundParams rounds() {
    polyspec::RoundParams params;
    params.shape = shape_;
    params.batch = batch();
    params.state = words_.mutable_data();
    return params;
  }

  RoundShape shape_;
  Array<int64_t> words_, eos_, plan_;
  uint64_t due_number_ = new_number();  // of the step to report, unused at first
  std::vector<int64_t> due_;
  std::vector<int32_t> none_;  // statuses of steps without status
};

}  // namespace

void bind_host_rounds(py::module_& m) {
  py::class_<HostStep>(m, "HostStep",
                       "A step that is due (polyspec/round_state.hpp): `level`, `group` the rows "
                       "with a part, and by row what `tensors.Plan` names; `input_ids` [B, T] "
                       "int64. Of all rows: `most`, the largest of `lengths`; "
                       "`lag`, the most tokens in front of these; `last`, the logits wanted stand "
                       "behind the last of T tokens in each; `even`, each of `lengths` is `most`; "
                       "`tail`, some row drafts a tail.")
      .def_readonly("level", &HostStep::level)
      .def_readonly("most", &HostStep::most)
      .def_readonly("lag", &HostStep::lag)
      .def_readonly("last", &HostStep::last)
      .def_readonly("even", &HostStep::even)
      .def_readonly("tail", &HostStep::tail)
      .def_readonly("group", &HostStep::group)
      .def_readonly("counts", &HostStep::counts)
      .def_readonly("first", &HostStep::first)
      .def_readonly("lengths", &HostStep::lengths)
      .def_readonly("positions", &HostStep::positions)
      .def_readonly("rounds", &HostStep::rounds)
      .def_readonly("input_ids", &HostStep::input_ids)
      .def_readonly("pending", &HostStep::pending, "[B, most] int64, the tokens to verify.");

  py::class_<HostReport>(m, "HostReport",
                         "What a step has brought: `entries` of the log by row, `kept` tokens that "
                         "each level's cache may keep [n, B], `cut` the levels from the step's own "
                         "downwards whose cache holds more, `appended` [2, B] int64, and `status` "
                         "the bits of all entries.")
      .def_readonly("entries", &HostReport::entries)
      .def_readonly("cut", &HostReport::cut)
      .def_readonly("kept", &HostReport::kept)
      .def_readonly("status", &HostReport::status)
      .def_readonly("appended", &HostReport::appended);

  py::class_<HostRounds>(m, "HostRounds", "State rows in the host's memory, which it refers to.")
      .def(py::init<RoundShape, Array<int64_t>, Array<int64_t>>(), py::arg("shape"),
           py::arg("words").noconvert(), py::arg("eos").noconvert())
      .def_property_readonly("plan", &HostRounds::plan,
                             "[7, B] int64, of the step that `next` gave last, which the next one "
                             "writes over.")
      .def("next", &HostRounds::next, py::arg("unread") = py::none(),
           "The step to do now: a draft, or the deepest verification that is due; None: all rows "
           "are complete. A draft reads from position `unread` [B] int64 on, or an earlier one.")
      .def("report", &HostRounds::report, py::arg("step"), py::arg("tokens"), py::arg("counts"),
           py::arg("status"), py::arg("ends") = true,
           "See `runtime.graphs.report`, of the step that `next` gave last; `status` None: nothing "
           "went wrong; `ends` False: no token "
           "ends a text. The log is empty then.");
}
