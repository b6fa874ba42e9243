// The Python module polyspec_ext._C: the scheduler, the build's properties, and (by being loaded)
// the operators of torch_ops.cpp. Its stubs are polyspec_ext/_C.pyi;
// python_tests/system/test_build.py compares the two.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>

#include "host_rounds.hpp"
#include "policy.hpp"
#include "polyspec/philox.hpp"
#include "polyspec/round_state.hpp"
#include "polyspec/scheduler.hpp"
#include "polyspec/status.hpp"

#ifdef POLYSPEC_CUDA_ON_CPU
namespace stand_in {
int64_t launches_so_far();  // csrc/tests/cuda_on_cpu/runtime/streams.hpp
}
#endif

namespace py = pybind11;
using polyspec::RoundShape;
using polyspec::Scheduler;
using polyspec::Step;

#ifndef POLYSPEC_WITH_CUDA
#define POLYSPEC_WITH_CUDA 0
#endif

namespace {

std::string step_repr(const Step& step) {
  const char* kinds[] = {"DRAFT", "VERIFY", "DONE"};
  return std::string("Step(kind=") + kinds[static_cast<int>(step.kind)] +
         ", level=" + std::to_string(step.level) + ", count=" + std::to_string(step.count) + ")";
}

py::dict build_info() {
  py::dict info;
  info["version"] = POLYSPEC_VERSION;
  info["cuda"] = static_cast<bool>(POLYSPEC_WITH_CUDA);
  info["cuda_architectures"] = POLYSPEC_WITH_CUDA ? POLYSPEC_CUDA_ARCHITECTURES : "";
  info["torch"] = POLYSPEC_TORCH_VERSION;
  info["compiler"] = __VERSION__;
  return info;
}

py::dict status_bits() {
  py::dict bits;
  bits["NAN"] = static_cast<int>(polyspec::kStatusNan);
  bits["INF"] = static_cast<int>(polyspec::kStatusInf);
  bits["EMPTY_ROW"] = static_cast<int>(polyspec::kStatusEmptyRow);
  bits["DRAFT_ROW"] = static_cast<int>(polyspec::kStatusDraftRow);
  bits["TOKEN_OUT_OF_RANGE"] = static_cast<int>(polyspec::kStatusTokenOutOfRange);
  bits["BAD_LENGTH"] = static_cast<int>(polyspec::kStatusBadLength);
  bits["BAD_PARAMETER"] = static_cast<int>(polyspec::kStatusBadParameter);
  bits["DRAFT_STATISTICS_MISMATCH"] = static_cast<int>(polyspec::kStatusDraftStatisticsMismatch);
  bits["BAD_INDEX"] = static_cast<int>(polyspec::kStatusBadIndex);
  bits["BAD_TREE"] = static_cast<int>(polyspec::kStatusBadTree);
  bits["ZERO_RESIDUAL"] = static_cast<int>(polyspec::kStatusZeroResidual);
  return bits;
}

uint64_t row_seed(uint64_t seed, int64_t row) {
  return polyspec::draw_bits(seed, row, 0, 0, polyspec::Purpose::kSample);
}

// The words of a state row that Python writes and reads.
void name_words(py::class_<RoundShape>& shape) {
  const std::pair<const char*, int64_t> names[] = {{"TOTAL", RoundShape::kTotal},
                                                   {"ROOM", RoundShape::kRoom},
                                                   {"STOPPED", RoundShape::kStopped},
                                                   {"STEP", RoundShape::kStep},
                                                   {"TAIL_WINDOW", RoundShape::kTailWindow},
                                                   {"CACHED", RoundShape::kCached},
                                                   {"ROUND", RoundShape::kRound},
                                                   {"WINDOW", RoundShape::kWindow},
                                                   {"BOUND", RoundShape::kBound},
                                                   {"PENDING", RoundShape::kPending},
                                                   {"BLOCKS", RoundShape::kBlocks},
                                                   {"CLOSED", RoundShape::kClosed},
                                                   {"COUNT", RoundShape::kCount},
                                                   {"POSITION", RoundShape::kPosition},
                                                   {"ACCEPTED", RoundShape::kAccepted},
                                                   {"EMITTED", RoundShape::kEmitted},
                                                   {"ENDED", RoundShape::kEnded},
                                                   {"STATUS", RoundShape::kStatus},
                                                   {"OF_TAIL", RoundShape::kOfTail},
                                                   {"PER_STEP", RoundShape::kPerStep}};
  for (const auto& [name, value] : names) shape.attr(name) = value;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled part of polyspec_ext. Import polyspec_ext instead.";
  m.def("build_info", &build_info, "What this module was built with.");
#ifdef POLYSPEC_CUDA_ON_CPU
  m.def("launches", &stand_in::launches_so_far, "Kernels that the stand-in has run so far.");
#endif
  m.def("status_bits", &status_bits, "The bits of a request's status (polyspec/status.hpp).");
  m.def("row_seed", &row_seed, py::arg("seed"), py::arg("row"),
        "The seed of row b >= 1 of a batch that was given one (`draw_bits`, polyspec/philox.hpp).");

  py::enum_<Step::Kind>(m, "StepKind", "What a step of the chain does.")
      .value("DRAFT", Step::Kind::kDraft)
      .value("VERIFY", Step::Kind::kVerify)
      .value("DONE", Step::Kind::kDone);

  py::class_<Step>(m, "Step", "One step of the chain: `level` drafts or verifies `count` tokens.")
      .def_readonly("kind", &Step::kind)
      .def_readonly("level", &Step::level)
      .def_readonly("count", &Step::count)
      .def_readonly("of_tail", &Step::of_tail)
      .def("__repr__", &step_repr);

  py::class_<Scheduler>(
      m, "Scheduler", "Host state machine of one chain, without tensors (polyspec/scheduler.hpp).")
      .def(py::init<std::vector<int64_t>, std::vector<int64_t>>(), py::arg("windows"),
           py::arg("rounds") = std::vector<int64_t>(),
           "windows[i-1] is the number of tokens level i waits for, i = 1 ... n-1, and rounds[i-1] "
           "the number of blocks from below after which it waits no longer; 0: no bound.")
      .def("start", &Scheduler::start, py::arg("max_new_tokens"), "Begins a request.")
      .def("next", &Scheduler::next, "What to do now; does not change the state.")
      .def("report", &Scheduler::report, py::arg("level"), py::arg("emitted"),
           py::arg("eos") = false, "Tells what the step that `next` named has brought.")
      .def("set_windows", &Scheduler::set_windows, py::arg("windows"),
           "Changes the windows from the next step on.")
      .def("set_tail", &Scheduler::set_tail, py::arg("tail"),
           "Tokens that level n drafts at most before level 1 verifies; 0: none.")
      .def("pending", &Scheduler::pending, py::arg("level"), "Tokens waiting for level 1 ... n-1.")
      .def_property_readonly("levels", &Scheduler::levels)
      .def_property_readonly("windows", &Scheduler::windows)
      .def_property_readonly("rounds", &Scheduler::rounds)
      .def_property_readonly("tail", &Scheduler::tail)
      .def_property_readonly("committed", &Scheduler::committed)
      .def_property_readonly("done", &Scheduler::done);

  py::class_<RoundShape> shape(m, "RoundShape", "Words of a state row (polyspec/round_state.hpp).");
  shape
      .def(py::init([](int32_t levels, int64_t steps, int64_t capacity) {
             return RoundShape{levels, steps, capacity};
           }),
           py::arg("levels"), py::arg("steps"), py::arg("capacity"))
      .def_readonly("levels", &RoundShape::levels)
      .def_readonly("steps", &RoundShape::steps)
      .def_readonly("capacity", &RoundShape::capacity)
      .def("level_at", &RoundShape::level_at, py::arg("level"))
      .def_property_readonly("log_at", &RoundShape::log_at)
      .def_property_readonly("text_at", &RoundShape::text_at)
      .def_property_readonly("words", &RoundShape::words);
  name_words(shape);

  bind_policies(m);
  bind_host_rounds(m);
}
