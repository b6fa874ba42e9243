// The window policies and the renewal model for Python (polyspec/policy.hpp, renewal.hpp), and the
// staged rule for rows of counts (round_state.hpp).
#include "polyspec/policy.hpp"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "policy.hpp"
#include "polyspec/renewal.hpp"
#include "polyspec/round_state.hpp"

namespace py = pybind11;
using polyspec::PolicyKind;
using polyspec::PolicyOptions;
using polyspec::RoundReport;
using polyspec::StepReport;
using polyspec::WindowPolicy;

namespace {

// level, tokens, accepted, width, batch, seconds, repeated
using Step = std::tuple<int32_t, int64_t, int64_t, int64_t, int64_t, double, bool>;

std::vector<int64_t> next(WindowPolicy& policy, int64_t row, bool begins,
                          const std::vector<Step>& steps, const std::vector<int64_t>& tokens,
                          int64_t together) {
  std::vector<StepReport> made;
  made.reserve(steps.size());
  for (const auto& [level, count, accepted, width, batch, seconds, repeated] : steps) {
    made.push_back({level, count, accepted, width, batch, seconds, repeated});
  }
  const RoundReport report{row,           begins,
                           made.data(),   static_cast<int64_t>(made.size()),
                           tokens.data(), static_cast<int64_t>(tokens.size()),
                           together};
  std::vector<int64_t> windows(static_cast<size_t>(policy.levels() - 1));
  policy.next(report, windows.data());
  return windows;
}

std::tuple<double, std::vector<double>, std::vector<double>> renewal(
    const std::vector<double>& acceptance, const std::vector<int64_t>& windows,
    std::vector<int64_t> rounds) {
  polyspec::RenewalRound round = polyspec::renewal_round(acceptance, windows, std::move(rounds));
  return {round.tokens, std::move(round.passes), std::move(round.verified)};
}

using Counts = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

Counts due(const Counts& state, int32_t levels) {
  polyspec::ScheduleDueParams params;
  params.in.shape.levels = levels;
  if (levels < 2 || state.ndim() != 2 || state.shape(1) != params.in.shape.words()) {
    throw std::invalid_argument("state: expected [B, words] of 2 levels or more, without a log");
  }
  params.in.batch = state.shape(0);
  params.in.state = const_cast<int64_t*>(state.data());  // (it only reads them)
  Counts found({py::ssize_t{2}, state.shape(0)});
  params.due = found.mutable_data();
  const polyspec::Result result = polyspec::schedule_due(params);
  if (!result.ok()) throw std::invalid_argument(result.message);
  return found;
}

}  // namespace

void bind_policies(py::module_& m) {
  py::enum_<PolicyKind>(m, "PolicyKind", "Which window policy (polyspec/policy.hpp).")
      .value("FIXED", PolicyKind::kFixed)
      .value("ONLINE", PolicyKind::kOnline)
      .value("FSM", PolicyKind::kFsm)
      .value("CACHED_FSM", PolicyKind::kCachedFsm)
      .value("Q_LEARNING", PolicyKind::kQLearning)
      .value("JOINT", PolicyKind::kJoint);

  py::class_<PolicyOptions>(m, "PolicyOptions", "Options of a window policy (polyspec/policy.hpp).")
      .def(py::init<>())
      .def_readwrite("kind", &PolicyOptions::kind)
      .def_readwrite("windows", &PolicyOptions::windows)
      .def_readwrite("max_windows", &PolicyOptions::max_windows)
      .def_readwrite("history", &PolicyOptions::history)
      .def_readwrite("max_acceptance", &PolicyOptions::max_acceptance)
      .def_readwrite("forgetting", &PolicyOptions::forgetting)
      .def_readwrite("ngram", &PolicyOptions::ngram)
      .def_readwrite("learning_rate", &PolicyOptions::learning_rate)
      .def_readwrite("discount", &PolicyOptions::discount)
      .def_readwrite("exploration", &PolicyOptions::exploration)
      .def_readwrite("seed", &PolicyOptions::seed)
      .def_readwrite("guard", &PolicyOptions::guard)
      .def_readwrite("guard_loss", &PolicyOptions::guard_loss)
      .def_readwrite("guard_hold", &PolicyOptions::guard_hold)
      .def_readwrite("guard_share", &PolicyOptions::guard_share);

  py::class_<WindowPolicy>(m, "WindowPolicy", "Chooses windows (polyspec/policy.hpp).")
      .def(py::init(&polyspec::make_policy), py::arg("options"))
      .def("next", &next, py::arg("row"), py::arg("begins"), py::arg("steps"), py::arg("tokens"),
           py::arg("batch") = 1,
           "Windows of a row's next round. Steps are (level, tokens, accepted, width, batch, "
           "seconds, repeated); batch: rows that take the round together.")
      .def("reset", &WindowPolicy::reset, "Forgets all rows and times.")
      .def_property_readonly("levels", &WindowPolicy::levels);

  m.def("renewal_round", &renewal, py::arg("acceptance"), py::arg("windows"),
        py::arg("rounds") = std::vector<int64_t>(),
        "(tokens, passes [n], verified [n-1]) per pass of the target (polyspec/renewal.hpp).");
  m.def("schedule_due", &due, py::arg("state"), py::arg("levels"),
        "[2, B] the level whose step is due in each row without log and text, and its tokens "
        "(polyspec/round_state.hpp).");
}
