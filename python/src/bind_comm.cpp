// Groups, communicators and meters. Every call that may wait for another rank releases the GIL.
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "bindings.hpp"
#include "comm/memory_loops.hpp"
#include "hopshard/collectives/hierarchical_communicator.hpp"
#include "hopshard/collectives/select.hpp"
#include "hopshard/comm/c10d.hpp"
#include "hopshard/comm/communicator.hpp"
#include "hopshard/comm/decorators.hpp"
#include "hopshard/comm/local.hpp"
#include "hopshard/comm/process_groups.hpp"
#include "hopshard/comm/recording.hpp"
#include "hopshard/comm/registry.hpp"
#include "hopshard/comm/store.hpp"
#include "hopshard/core/error.hpp"
#include "hopshard/metrics/meter.hpp"
#include "hopshard/topology/link_cost.hpp"

namespace hopshard::python {

namespace py = pybind11;

namespace {

using Milliseconds = std::int64_t;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

/// Dropping a Work waits for it, and Python drops objects while it holds the GIL, which another
/// rank thread of the process may need in order to arrive.
class PyWork {
 public:
  explicit PyWork(WorkPtr work) : work_(std::move(work)) {}
  PyWork(PyWork&&) = default;
  ~PyWork() {
    if (work_) {
      const py::gil_scoped_release release;
      work_.reset();
    }
  }

  void wait() const { work_->wait(); }
  [[nodiscard]] bool test() const { return work_->test(); }

 private:
  WorkPtr work_;
};

void require_plain(const at::Tensor& tensor) {
  HOPSHARD_CHECK(tensor.is_cpu() && tensor.is_contiguous(), InvalidArgument,
                 "memory loops take contiguous CPU tensors");
}

void copy_memory(const at::Tensor& to, const at::Tensor& from) {
  require_plain(to);
  require_plain(from);
  HOPSHARD_CHECK(to.nbytes() == from.nbytes(), InvalidArgument, "a copy of ", from.nbytes(),
                 " bytes to ", to.nbytes());
  detail::copy_memory(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes(),
                      detail::store_mode_for(from.nbytes()));
}

void sum_memory(const at::Tensor& to, const std::vector<at::Tensor>& parts) {
  require_plain(to);
  HOPSHARD_CHECK(!parts.empty() && detail::is_reducible(to.scalar_type()), InvalidArgument,
                 "a sum needs parts of a dtype that can be added");
  std::vector<const void*> sources;
  for (const at::Tensor& part : parts) {
    require_plain(part);
    HOPSHARD_CHECK(part.scalar_type() == to.scalar_type() && part.numel() == to.numel(),
                   InvalidArgument, "the parts of a sum are like its result");
    sources.push_back(part.const_data_ptr());
  }
  detail::reduce_memory(to.mutable_data_ptr(), sources.data(), sources.size(), to.numel(),
                        {.dtype = to.scalar_type(), .mode = detail::store_mode_for(to.nbytes())});
}

/// What Python gets to hold. The end of a communicator may wait for a thread of its own, and that
/// thread may need the GIL, to let go of a tensor that Python has seen.
CommunicatorPtr without_gil_at_its_end(CommunicatorPtr communicator) {
  Communicator* const raw = communicator.get();
  return {raw, [held = std::move(communicator)](Communicator* /*raw*/) mutable {
            std::optional<py::gil_scoped_release> release;
            if (PyGILState_Check() == 1) {
              release.emplace();
            }
            held.reset();
          }};
}

ReduceOp parse_op(const std::string& op) {
  if (op == "sum") {
    return ReduceOp::kSum;
  }
  HOPSHARD_CHECK(op == "max", InvalidArgument, "unknown reduction '", op,
                 "'; legal are 'sum' and 'max' (a mean is a sum scaled by the caller)");
  return ReduceOp::kMax;
}

CommOptions make_options(std::string tag, Milliseconds timeout_ms, bool accumulate = false) {
  return {.timeout = std::chrono::milliseconds(timeout_ms),
          .tag = std::move(tag),
          .accumulate = accumulate};
}

/// The returned Work is made without the GIL and becomes a Python object with it.
template <typename Issue>
std::unique_ptr<PyWork> issue(Issue call) {
  const py::gil_scoped_release release;
  return std::make_unique<PyWork>(call());
}

void bind_group(py::module_& m) {
  py::class_<Group>(m, "Group",
                    "Ranks that communicate: who takes part, who I am, where chunks lie.")
      .def(py::init([](std::string name, std::vector<int> ranks, int rank, std::vector<int> slots) {
             Group group{std::move(name), std::move(ranks), rank, std::move(slots)};
             group.validate();
             return group;
           }),
           py::arg("name"), py::arg("ranks"), py::arg("rank"),
           py::arg("slots") = std::vector<int>{})
      .def_readonly("name", &Group::name)
      .def_readonly("ranks", &Group::ranks)
      .def_readonly("rank", &Group::rank)
      .def_readonly("slots", &Group::slots)
      .def_property_readonly("size", &Group::size)
      .def_property_readonly("global_rank", &Group::global_rank)
      .def(
          "slot_of",
          [](const Group& self, int member) {
            HOPSHARD_CHECK(member >= 0 && member < self.size(), InvalidArgument, "group '",
                           self.name, "' has no member ", member);
            return self.slot_of(member);
          },
          py::arg("member"))
      .def("__repr__", [](const Group& self) {
        return detail::concatenate("Group('", self.name, "', rank ", self.rank, " of ", self.size(),
                                   ")");
      });
}

void bind_communicator(py::module_& m) {
  py::class_<PyWork>(m, "Work", "A collective in flight.")
      .def("wait", &PyWork::wait, ReleaseGil())
      .def("test", &PyWork::test, ReleaseGil());

  py::class_<Communicator, CommunicatorPtr>(m, "Communicator",
                                            "Collective operations over one group of ranks.")
      .def_property_readonly("group", &Communicator::group)
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("backend",
                             [](const Communicator& self) { return std::string(self.backend()); })
      .def(
          "all_gather",
          [](Communicator& self, at::Tensor output, at::Tensor input, std::string tag,
             Milliseconds timeout_ms) {
            return issue([&] {
              return self.all_gather(std::move(output), std::move(input),
                                     make_options(std::move(tag), timeout_ms));
            });
          },
          py::arg("output"), py::arg("input"), py::arg("tag") = "", py::arg("timeout_ms") = 0)
      .def(
          "reduce_scatter",
          [](Communicator& self, at::Tensor output, at::Tensor input, const std::string& op,
             std::string tag, Milliseconds timeout_ms, bool accumulate) {
            return issue([&] {
              return self.reduce_scatter(std::move(output), std::move(input), parse_op(op),
                                         make_options(std::move(tag), timeout_ms, accumulate));
            });
          },
          py::arg("output"), py::arg("input"), py::arg("op") = "sum", py::arg("tag") = "",
          py::arg("timeout_ms") = 0, py::arg("accumulate") = false)
      .def(
          "all_reduce",
          [](Communicator& self, at::Tensor tensor, const std::string& op, std::string tag,
             Milliseconds timeout_ms) {
            return issue([&] {
              return self.all_reduce(std::move(tensor), parse_op(op),
                                     make_options(std::move(tag), timeout_ms));
            });
          },
          py::arg("tensor"), py::arg("op") = "sum", py::arg("tag") = "", py::arg("timeout_ms") = 0)
      .def(
          "broadcast",
          [](Communicator& self, at::Tensor tensor, int root, std::string tag,
             Milliseconds timeout_ms) {
            return issue([&] {
              return self.broadcast(std::move(tensor), root,
                                    make_options(std::move(tag), timeout_ms));
            });
          },
          py::arg("tensor"), py::arg("root"), py::arg("tag") = "", py::arg("timeout_ms") = 0)
      .def(
          "barrier",
          [](Communicator& self, std::string tag, Milliseconds timeout_ms) {
            self.barrier(make_options(std::move(tag), timeout_ms));
          },
          py::arg("tag") = "", py::arg("timeout_ms") = 0, ReleaseGil())
      .def(
          "split",
          [](Communicator& self, Group part) {
            return without_gil_at_its_end(self.split(std::move(part)));
          },
          py::arg("part"), ReleaseGil())
      .def("allocate", &Communicator::allocate, py::arg("num_bytes"), ReleaseGil())
      .def("register_memory", &Communicator::register_memory, py::arg("memory"), ReleaseGil())
      .def("abort", &Communicator::abort, py::arg("reason"), ReleaseGil());
}

void bind_backends(py::module_& m) {
  py::class_<LocalHub, std::shared_ptr<LocalHub>>(
      m, "LocalHub", "Where ranks that are threads of this process meet.")
      .def(py::init([](int world_size, Milliseconds timeout_ms) {
             return std::make_shared<LocalHub>(world_size, std::chrono::milliseconds(timeout_ms));
           }),
           py::arg("world_size"), py::arg("timeout_ms") = LocalHub::kDefaultTimeout.count())
      .def_property_readonly("world_size", &LocalHub::world_size)
      .def(
          "communicator",
          [](LocalHub& self, Group group) {
            return without_gil_at_its_end(self.communicator(std::move(group)));
          },
          py::arg("group"), ReleaseGil())
      .def("abort", &LocalHub::abort, py::arg("reason"), ReleaseGil())
      .def("rank_failed", &LocalHub::rank_failed, py::arg("global_rank"), py::arg("reason"),
           ReleaseGil());

  py::class_<Store, StorePtr>(m, "Store", "Where ranks leave addresses before they are connected.")
      .def(
          "set",
          [](Store& self, const std::string& key, const std::string& value) {
            self.set(key, value);
          },
          py::arg("key"), py::arg("value"), ReleaseGil())
      .def(
          "get",
          [](Store& self, const std::string& key, Milliseconds timeout_ms) {
            return self.get(key, std::chrono::milliseconds(timeout_ms));
          },
          py::arg("key"), py::arg("timeout_ms"), ReleaseGil())
      .def(
          "prefixed",
          [](StorePtr self, std::string prefix) {
            return make_prefix_store(std::move(self), std::move(prefix));
          },
          py::arg("prefix"));
  m.def("copy_memory", &copy_memory, py::arg("to"), py::arg("source"), ReleaseGil());
  m.def("sum_memory", &sum_memory, py::arg("to"), py::arg("parts"), ReleaseGil());

  m.def("memory_store", &make_memory_store);
  m.def("c10d_store", &make_c10d_store, py::arg("store"));

  m.def(
      "c10d_communicator",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& process_group, Group group,
         Milliseconds timeout_ms, MakeProcessGroup make_part, StorePtr world_store,
         bool is_sole_user) {
        return without_gil_at_its_end(make_c10d_communicator(
            process_group, std::move(group), std::chrono::milliseconds(timeout_ms),
            std::move(make_part), std::move(world_store), is_sole_user));
      },
      py::arg("process_group"), py::arg("group"), py::arg("timeout_ms"),
      py::arg("make_part") = py::none(), py::arg("world_store") = py::none(),
      py::arg("is_sole_user") = false);

  py::class_<BackendInfo>(m, "BackendInfo", "A transport, and whether it can be used here.")
      .def_readonly("name", &BackendInfo::name)
      .def_readonly("summary", &BackendInfo::summary)
      .def_readonly("why_not", &BackendInfo::why_not)
      .def("__repr__", [](const BackendInfo& self) {
        return detail::concatenate("BackendInfo('", self.name, "', ",
                                   self.why_not ? *self.why_not : "available", ")");
      });
  m.def("backends", &backends);
  m.def(
      "connect_backend",
      [](const std::string& name, StorePtr store, Group group, Milliseconds timeout_ms) {
        return without_gil_at_its_end(
            connect_backend(name, {.store = std::move(store),
                                   .group = std::move(group),
                                   .timeout = std::chrono::milliseconds(timeout_ms)}));
      },
      py::arg("name"), py::arg("store"), py::arg("group"), py::arg("timeout_ms"), ReleaseGil());

  m.def(
      "recording_communicator",
      [](CommunicatorPtr inner, Group group, std::shared_ptr<Meter> meter, int ranks_per_node,
         std::shared_ptr<CallLog> log) {
        return without_gil_at_its_end(make_recording_communicator(
            std::move(inner), std::move(group), std::move(meter), ranks_per_node, std::move(log)));
      },
      py::arg("inner").none(true), py::arg("group"), py::arg("meter"), py::arg("ranks_per_node"),
      py::arg("log") = py::none());

  m.def(
      "delayed_communicator",
      [](CommunicatorPtr inner, std::uint64_t seed, std::int64_t max_delay_us,
         std::int64_t fail_at_call, std::int64_t hang_at_call, Milliseconds hang_limit_ms) {
        DelayedOptions options;
        options.seed = seed;
        options.max_delay = std::chrono::microseconds(max_delay_us);
        options.fail_at_call = fail_at_call;
        options.hang_at_call = hang_at_call;
        options.hang_limit = std::chrono::milliseconds(hang_limit_ms);
        return without_gil_at_its_end(make_delayed_communicator(std::move(inner), options));
      },
      py::arg("inner"), py::arg("seed") = 0, py::arg("max_delay_us") = 0,
      py::arg("fail_at_call") = -1, py::arg("hang_at_call") = -1,
      py::arg("hang_limit_ms") = 60'000);

  m.def(
      "simulated_communicator",
      [](CommunicatorPtr inner, std::int64_t max_delay_us, std::uint64_t seed) {
        return without_gil_at_its_end(make_simulated_communicator(
            std::move(inner),
            {.seed = seed, .max_delay = std::chrono::microseconds(max_delay_us)}));
      },
      py::arg("inner"), py::arg("max_delay_us"), py::arg("seed") = 0);
}

Selection parse_selection(const std::string& text) {
  if (text == "flat") {
    return Selection::kFlat;
  }
  if (text == "hierarchical") {
    return Selection::kHierarchical;
  }
  HOPSHARD_CHECK(text == "auto", InvalidArgument, "unknown algorithm '", text,
                 "'; legal are 'auto', 'flat' and 'hierarchical'");
  return Selection::kByCost;
}

CollectiveOp parse_collective(const std::string& text) {
  for (const CollectiveOp op :
       {CollectiveOp::kAllGather, CollectiveOp::kReduceScatter, CollectiveOp::kAllReduce,
        CollectiveOp::kBroadcast, CollectiveOp::kBarrier}) {
    if (to_string(op) == text) {
      return op;
    }
  }
  throw InvalidArgument("unknown collective '" + text + "'");
}

void bind_hierarchy(py::module_& m) {
  py::class_<NodeLinkCosts>(m, "NodeLinkCosts", "What a message costs inside and between nodes.")
      .def(py::init([](double intra_alpha_us, double intra_gb_per_s, double inter_alpha_us,
                       double inter_gb_per_s) {
             return NodeLinkCosts{.intra_node = {intra_alpha_us, intra_gb_per_s},
                                  .inter_node = {inter_alpha_us, inter_gb_per_s}};
           }),
           py::arg("intra_alpha_us"), py::arg("intra_gb_per_s"), py::arg("inter_alpha_us"),
           py::arg("inter_gb_per_s"));
  m.def(
      "predict_us",
      [](const std::string& op, const std::string& algorithm, int num_nodes, int ranks_per_node,
         std::int64_t num_bytes, const NodeLinkCosts& costs) {
        const Selection which = parse_selection(algorithm);
        HOPSHARD_CHECK(which != Selection::kByCost, InvalidArgument,
                       "a prediction is for 'flat' or 'hierarchical'");
        return predict_us(parse_collective(op),
                          which == Selection::kFlat ? Algorithm::kFlat : Algorithm::kHierarchical,
                          {.num_nodes = num_nodes, .ranks_per_node = ranks_per_node}, num_bytes,
                          costs);
      },
      py::arg("op"), py::arg("algorithm"), py::arg("num_nodes"), py::arg("ranks_per_node"),
      py::arg("num_bytes"), py::arg("costs"));
  m.def("has_slice_order", &has_slice_order, py::arg("group"), py::arg("num_nodes"),
        py::arg("ranks_per_node"));
  py::class_<NodeParts>(m, "NodeParts", "How a group lies on nodes, if two levels apply to it.")
      .def_readonly("num_nodes", &NodeParts::num_nodes)
      .def_readonly("ranks_per_node", &NodeParts::ranks_per_node)
      .def_readonly("intra_node", &NodeParts::intra_node)
      .def_readonly("inter_node", &NodeParts::inter_node);
  m.def("plan_node_parts", &plan_node_parts, py::arg("group"), py::arg("ranks_per_node"));
  m.def(
      "hierarchical_communicator",
      [](Group group, CommunicatorPtr intra_node, CommunicatorPtr inter_node, StorePtr store,
         Milliseconds timeout_ms) {
        return without_gil_at_its_end(make_hierarchical_communicator(
            std::move(group), std::move(intra_node), std::move(inter_node),
            {.timeout = std::chrono::milliseconds(timeout_ms), .store = std::move(store)}));
      },
      py::arg("group"), py::arg("intra_node"), py::arg("inter_node"), py::arg("store").none(true),
      py::arg("timeout_ms"));
  m.def(
      "selecting_communicator",
      [](CommunicatorPtr flat, CommunicatorPtr hierarchical, int num_nodes, int ranks_per_node,
         NodeLinkCosts costs, const std::string& algorithm, StorePtr store) {
        return without_gil_at_its_end(make_selecting_communicator(
            std::move(flat), std::move(hierarchical),
            {.shape = {.num_nodes = num_nodes, .ranks_per_node = ranks_per_node},
             .costs = costs,
             .selection = parse_selection(algorithm),
             .store = std::move(store),
             .meter = nullptr}));
      },
      py::arg("flat"), py::arg("hierarchical").none(true), py::arg("num_nodes"),
      py::arg("ranks_per_node"), py::arg("costs"), py::arg("algorithm") = "auto",
      py::arg("store") = py::none());
}

void bind_meter(py::module_& m) {
  py::class_<Meter, std::shared_ptr<Meter>>(m, "Meter", "Named integer counters of one rank.")
      .def(py::init<>())
      .def("add", &Meter::add, py::arg("name"), py::arg("amount") = 1)
      .def("record_peak", &Meter::record_peak, py::arg("name"), py::arg("value"))
      .def("value", &Meter::value, py::arg("name"))
      .def("counters", &Meter::counters)
      .def("reset", &Meter::reset)
      .def(
          "comm_total",
          [](const Meter& self, const std::string& quantity, std::string group, std::string op,
             std::string kind) {
            return comm_total(self, quantity, {std::move(group), std::move(op), std::move(kind)});
          },
          py::arg("quantity"), py::arg("group") = "", py::arg("op") = "", py::arg("kind") = "");

  py::class_<RecordedCall>(m, "RecordedCall", "One collective as this rank issued it.")
      .def_readonly("op", &RecordedCall::op)
      .def_readonly("tag", &RecordedCall::tag)
      .def_readonly("group", &RecordedCall::group)
      .def_readonly("numel", &RecordedCall::numel)
      .def_property_readonly("dtype",
                             [](const RecordedCall& self) -> std::optional<at::ScalarType> {
                               if (self.dtype == at::ScalarType::Undefined) {
                                 return std::nullopt;
                               }
                               return self.dtype;
                             })
      .def("__repr__", [](const RecordedCall& self) {
        return detail::concatenate(self.op, " '", self.tag, "' of ", self.numel, " in '",
                                   self.group, "'");
      });
  py::class_<CallLog, std::shared_ptr<CallLog>>(m, "CallLog",
                                                "The order in which a rank issued collectives.")
      .def(py::init<>())
      .def("calls", &CallLog::calls)
      .def("clear", &CallLog::clear);
}

void bind_process_groups(py::module_& m) {
  py::class_<ProcessGroups>(m, "ProcessGroups", "The communicators of one rank.")
      .def_readonly("world", &ProcessGroups::world)
      .def_readonly("sharding", &ProcessGroups::sharding)
      .def_readonly("replication", &ProcessGroups::replication)
      .def_readonly("secondary", &ProcessGroups::secondary);
  // The GIL stays: the factory is Python, and whatever it waits in releases the GIL itself.
  m.def("make_process_groups", &make_process_groups, py::arg("layout"), py::arg("rank"),
        py::arg("factory"), py::arg("secondary_degree") = 0);
  m.def("make_world_group", &make_world_group, py::arg("layout"), py::arg("rank"));
  m.def("make_sharding_group", &make_sharding_group, py::arg("layout"), py::arg("rank"));
  m.def("make_replication_group", &make_replication_group, py::arg("layout"), py::arg("rank"));
}

}  // namespace

void bind_comm(py::module_& m) {
  bind_group(m);
  bind_communicator(m);
  bind_meter(m);
  bind_backends(m);
  bind_hierarchy(m);
  bind_process_groups(m);
}

}  // namespace hopshard::python
