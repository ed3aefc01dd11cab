// Python bindings of the replaceable communicator backend: deadpool_ext._shell.
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <thread>

#include "shell_backend.h"
#include "sockets.h"

namespace py = pybind11;

namespace deadpool {
namespace {

using Shell = ShellBackend;
using ShellPtr = c10::intrusive_ptr<Shell>;
using Seconds = std::chrono::duration<double>;

struct AbortResult {
  double seconds; // until everything had ended, or the deadline
  int sockets; // shut down
  int open_sockets; // not closed by their owner when the deadline passed
  int64_t pending; // operations that had not ended when the deadline passed
  int64_t lost; // operations that gloo lost: their sockets are closed, its threads sleep, their waiters were woken
};

constexpr auto kLossPatience = std::chrono::milliseconds(100); // before an operation is suspected to be lost
constexpr auto kSleepSample = std::chrono::milliseconds(20);

// Ends the operations in flight of these fenced shells by shutting down the recorded sockets, and waits until their
// owner has closed them and no operation is left, or only such as gloo lost: from then on nothing of that generation
// writes into a tensor.
AbortResult abort_connections(SocketLedger& ledger, const std::vector<ShellPtr>& shells, double timeout_s) {
  const auto start = std::chrono::steady_clock::now();
  AbortResult result{0.0, ledger.shutdown_all(), 0, 0, 0};
  while (true) {
    // Gloo sometimes keeps a socket whose connection was reset until its pair is destroyed; nothing arrives on it.
    result.open_sockets = ledger.still_open(std::chrono::steady_clock::now() - start < kLossPatience);
    result.pending = 0;
    bool inside = false;
    for (const auto& shell : shells) {
      result.pending += shell->pending();
      inside = shell->anybody_waits_inside() || inside;
    }
    const auto passed = std::chrono::steady_clock::now() - start;
    result.seconds = Seconds(passed).count();
    if (result.open_sockets == 0 && result.pending == 0 && !inside) {
      return result;
    }
    if (result.open_sockets == 0 && passed > kLossPatience && gloo_sleeps(kSleepSample)) {
      result.lost = result.pending;
      result.pending = 0;
      for (const auto& shell : shells) {
        shell->abandon();
      }
      result.seconds = Seconds(std::chrono::steady_clock::now() - start).count();
      return result;
    }
    if (result.seconds >= timeout_s) {
      return result;
    }
    // The owner's loop notices by itself; there is no event to wait for.
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

c10::DeviceType device_type(const std::string& name) {
  TORCH_CHECK_VALUE(name == "cpu" || name == "cuda", "device type must be cpu or cuda, got ", name);
  return name == "cuda" ? c10::kCUDA : c10::kCPU;
}

// What the communicator for accelerator tensors says of itself, as c10d's ErrorType: 0 is none, or no such communicator.
int error(Shell& shell) {
  const auto inner = shell.inner(c10::kCUDA);
  return inner ? static_cast<int>(inner->getError()) : 0;
}

// Methods that only some communicators have, called from Python on the group's backend (Megatron's NCCL allocator).
py::object forward(Shell& shell, const char* method, const py::args& args, const py::kwargs& kwargs) {
  BackendPtr inner;
  {
    py::gil_scoped_release no_gil;
    inner = shell.inner(c10::kCUDA);
  }
  if (!inner) {
    throw py::attribute_error(c10::str("deadpool: group '", shell.getGroupUid(), "' has no NCCL communicator"));
  }
  return py::cast(inner).attr(method)(*args, **kwargs);
}

py::dict counts(Shell& shell) {
  const auto* counters = shell.counters();
  py::dict result;
  result["generation"] = static_cast<int64_t>(counters->generation.load());
  result["issued"] = counters->issued.load();
  result["completed"] = counters->completed.load();
  result["waiting"] = counters->waiting.load();
  result["collectives"] = counters->collectives.load();
  const auto last = static_cast<c10d::OpType>(counters->last_op.load());
  result["last_op"] = counters->issued.load() > 0 ? c10d::opTypeToString(last) : std::string();
  return result;
}

} // namespace
} // namespace deadpool

PYBIND11_MODULE(_shell, m) {
  using namespace deadpool;
  py::module_::import("torch._C._distributed_c10d"); // registers the base classes
  const auto no_gil = py::call_guard<py::gil_scoped_release>();

  py::enum_<Kind>(m, "Kind")
      .value("NONE", Kind::kNone)
      .value("CONNECTED", Kind::kConnected)
      .value("LOCAL", Kind::kLocal)
      .value("SOLO", Kind::kSolo);

  py::class_<Shell, c10d::Backend, ShellPtr>(m, "ShellBackend")
      .def(
          py::init([](int rank, int size, double timeout_s) {
            const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(Seconds(timeout_s));
            return c10::make_intrusive<Shell>(rank, size, timeout);
          }),
          py::arg("rank"),
          py::arg("size"),
          py::arg("timeout_s"))
      .def(
          "set_inner",
          [](Shell& shell, int64_t generation, BackendPtr cpu, BackendPtr cuda) {
            TORCH_CHECK_VALUE(cpu || cuda, "a connected group needs a communicator");
            shell.set_inner(generation, Kind::kConnected, std::move(cpu), std::move(cuda));
          },
          py::arg("generation"),
          py::arg("cpu") = BackendPtr(),
          py::arg("cuda") = BackendPtr(),
          no_gil)
      .def("set_local", &Shell::set_local, py::arg("generation"), py::arg("kind"), no_gil)
      .def("fence", &Shell::fence, py::arg("generation"), no_gil)
      .def("release", &Shell::release, no_gil)
      .def("inner", [](Shell& shell, const std::string& device) { return shell.inner(device_type(device)); })
      .def("error", &error, no_gil)
      .def("total", &Shell::total, py::arg("kind"))
      .def("counts", &counts)
      .def(
          "bind_counters",
          [](Shell& shell, uintptr_t address, uint64_t group) {
            shell.bind_counters(reinterpret_cast<GroupCounters*>(address), group);
          },
          py::arg("address"),
          py::arg("group") = 0,
          no_gil)
      .def("register_mem_pool", [](Shell& s, const py::args& a, const py::kwargs& k) {
        return forward(s, "register_mem_pool", a, k);
      })
      .def("deregister_mem_pool", [](Shell& s, const py::args& a, const py::kwargs& k) {
        return forward(s, "deregister_mem_pool", a, k);
      })
      .def_property_readonly("fenced", &Shell::fenced)
      .def_property_readonly("closed", &Shell::closed)
      .def_property_readonly("generation", &Shell::generation)
      .def_property_readonly("kind", &Shell::kind)
      .def_property_readonly("pending", &Shell::pending)
      .def_property_readonly("timeout_s", [](const Shell& shell) { return Seconds(shell.timeout()).count(); });
  m.attr("COUNTERS_BYTES") = sizeof(GroupCounters);
  m.attr("PULSE_BYTES") = sizeof(Pulse);
  m.def(
      "place_pulse", [](uintptr_t address) { Pulse::place(reinterpret_cast<Pulse*>(address)); }, py::arg("address"));
  m.def("operation_names", [] {
    std::vector<std::string> names;
    for (int op = 0; op <= static_cast<int>(c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED); ++op) {
      names.push_back(c10d::opTypeToString(static_cast<c10d::OpType>(op)));
    }
    return names;
  });

  py::class_<SocketInfo>(m, "SocketInfo")
      .def_readonly("fd", &SocketInfo::fd)
      .def_readonly("cookie", &SocketInfo::cookie)
      .def_readonly("listening", &SocketInfo::listening)
      .def_readonly("local", &SocketInfo::local)
      .def_readonly("remote", &SocketInfo::remote);
  m.def("tcp_sockets", &tcp_sockets, no_gil);

  py::class_<SocketLedger>(m, "SocketLedger")
      .def(py::init<>())
      .def("record", &SocketLedger::record, py::arg("locals"), py::arg("remotes"), no_gil)
      .def("add", &SocketLedger::add, py::arg("socket"), no_gil)
      .def("shutdown_all", &SocketLedger::shutdown_all, no_gil)
      .def("still_open", &SocketLedger::still_open, py::arg("disconnected_too") = true, no_gil)
      .def_property_readonly("recorded", &SocketLedger::recorded);

  py::class_<AbortResult>(m, "AbortResult")
      .def_readonly("seconds", &AbortResult::seconds)
      .def_readonly("sockets", &AbortResult::sockets)
      .def_readonly("open_sockets", &AbortResult::open_sockets)
      .def_readonly("pending", &AbortResult::pending)
      .def_readonly("lost", &AbortResult::lost);
  m.def("abort_connections", &abort_connections, py::arg("ledger"), py::arg("shells"), py::arg("timeout_s"), no_gil);

  m.def("retire", [](std::vector<BackendPtr> backends) { Retirement::instance().add(std::move(backends)); }, no_gil);
  m.def("retiring", [] { return Retirement::instance().count(); }, no_gil);
  m.def(
      "wait_retired",
      [](int64_t limit, double timeout_s) {
        const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(Seconds(timeout_s));
        return Retirement::instance().wait(limit, timeout);
      },
      py::arg("limit"),
      py::arg("timeout_s"),
      no_gil);
}
