// The pure layers: groups, slice order, flat layout, pieces. Cheap calls that keep the GIL.
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "hopshard/layout/flat_layout.hpp"
#include "hopshard/layout/piece_table.hpp"
#include "hopshard/layout/slice_order.hpp"
#include "hopshard/topology/group_layout.hpp"

namespace hopshard::python {
namespace {

namespace py = pybind11;

void bind_group_layout(py::module_& m) {
  py::class_<GroupLayout>(m, "GroupLayout", "Degrees of a world and the groups that follow.")
      .def(py::init<int, int, int>(), py::arg("world_size"), py::arg("ranks_per_node"),
           py::arg("degree"))
      .def_property_readonly("world_size", &GroupLayout::world_size)
      .def_property_readonly("ranks_per_node", &GroupLayout::ranks_per_node)
      .def_property_readonly("degree", &GroupLayout::degree)
      .def_property_readonly("num_replicas", &GroupLayout::num_replicas)
      .def_property_readonly("is_hierarchical", &GroupLayout::is_hierarchical)
      .def("node_of", &GroupLayout::node_of, py::arg("rank"))
      .def("local_rank_of", &GroupLayout::local_rank_of, py::arg("rank"))
      .def("sharding_group", &GroupLayout::sharding_group, py::arg("rank"))
      .def("replication_group", &GroupLayout::replication_group, py::arg("rank"))
      .def("intra_node_group", &GroupLayout::intra_node_group, py::arg("rank"))
      .def("inter_node_group", &GroupLayout::inter_node_group, py::arg("rank"))
      .def("slice_of", &GroupLayout::slice_of, py::arg("rank"))
      .def("__repr__", [](const GroupLayout& layout) {
        return "GroupLayout(world_size=" + std::to_string(layout.world_size()) +
               ", ranks_per_node=" + std::to_string(layout.ranks_per_node()) +
               ", degree=" + std::to_string(layout.degree()) + ")";
      });
}

void bind_slice_order(py::module_& m) {
  py::class_<SliceOrder>(m, "SliceOrder", "(node, local rank) <-> slice.")
      .def(py::init<int, int>(), py::arg("num_nodes"), py::arg("ranks_per_node"))
      .def("__len__", &SliceOrder::size)
      .def(
          "slice_of",
          [](const SliceOrder& order, int node, int local_rank) {
            return order.slice_of({.node = node, .local_rank = local_rank});
          },
          py::arg("node"), py::arg("local_rank"))
      .def(
          "place_of",
          [](const SliceOrder& order, int slice) {
            const NodeAndLocalRank place = order.place_of(slice);
            return std::pair(place.node, place.local_rank);
          },
          py::arg("slice"), "(node, local rank)")
      .def("slots", &SliceOrder::slots);
}

void bind_flat_layout(py::module_& m) {
  m.attr("FLAT_ALIGNMENT_BYTES") = kFlatAlignmentBytes;
  py::class_<FlatLayout>(m, "FlatLayout", "Offsets and slices of one flat buffer, in elements.")
      .def(py::init<const std::vector<std::int64_t>&, std::int64_t, int>(), py::arg("numels"),
           py::arg("itemsize_bytes"), py::arg("num_slices"))
      .def_property_readonly("num_parameters", &FlatLayout::num_parameters)
      .def_property_readonly("num_slices", &FlatLayout::num_slices)
      .def_property_readonly("numel", &FlatLayout::numel)
      .def_property_readonly("slice_numel", &FlatLayout::slice_numel)
      .def_property_readonly("parameter_numel", &FlatLayout::parameter_numel)
      .def("offset_of", &FlatLayout::offset_of, py::arg("parameter"))
      .def("numel_of", &FlatLayout::numel_of, py::arg("parameter"));
}

void bind_piece_table(py::module_& m) {
  py::class_<Piece>(m, "Piece", "A range of one parameter that lies inside one slice.")
      .def_readonly("parameter", &Piece::parameter)
      .def_readonly("slice", &Piece::slice)
      .def_readonly("parameter_begin", &Piece::parameter_begin)
      .def_readonly("slice_begin", &Piece::slice_begin)
      .def_readonly("numel", &Piece::numel)
      .def(py::self == py::self)
      .def("__repr__", [](const Piece& piece) {
        return "Piece(parameter=" + std::to_string(piece.parameter) +
               ", slice=" + std::to_string(piece.slice) +
               ", parameter_begin=" + std::to_string(piece.parameter_begin) +
               ", slice_begin=" + std::to_string(piece.slice_begin) +
               ", numel=" + std::to_string(piece.numel) + ")";
      });
  py::class_<PieceTable>(m, "PieceTable", "All pieces of one flat buffer.")
      .def(py::init<const FlatLayout&>(), py::arg("layout"))
      .def("in_slice", &PieceTable::in_slice, py::arg("slice"))
      .def("of_parameter", &PieceTable::of_parameter, py::arg("parameter"))
      .def("of_range", &PieceTable::of_range, py::arg("parameter"), py::arg("begin"),
           py::arg("end"))
      .def("of_slice_range", &PieceTable::of_slice_range, py::arg("slice"), py::arg("begin"),
           py::arg("end"));
}

}  // namespace

void bind_topology(pybind11::module_& m) {
  bind_group_layout(m);
  bind_slice_order(m);
  bind_flat_layout(m);
  bind_piece_table(m);
}

}  // namespace hopshard::python
