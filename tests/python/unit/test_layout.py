"""The bindings of the pure layers; their properties are proved in tests/cpp/unit."""

from __future__ import annotations

import pytest
import torch
from hopshard import _C


def test_group_layout_of_eight_ranks() -> None:
    layout = _C.GroupLayout(world_size=8, ranks_per_node=2, degree=4)
    assert layout.sharding_group(5) == [4, 5, 6, 7]
    assert layout.replication_group(5) == [1, 5]
    assert layout.intra_node_group(5) == [4, 5]
    assert layout.inter_node_group(5) == [5, 7]
    assert (layout.node_of(5), layout.local_rank_of(5)) == (2, 1)
    assert [layout.slice_of(rank) for rank in range(8)] == [0, 2, 1, 3, 0, 2, 1, 3]
    assert layout.is_hierarchical
    assert layout.num_replicas == 2
    assert repr(layout) == "GroupLayout(world_size=8, ranks_per_node=2, degree=4)"


def test_an_illegal_degree_names_the_legal_ones() -> None:
    with pytest.raises(_C.ConfigError, match=r"degree 5 .* world size 8; .* 1, 2, 4, 8"):
        _C.GroupLayout(8, 2, 5)
    with pytest.raises(_C.InvalidArgument, match="rank 8"):
        _C.GroupLayout(8, 2, 4).slice_of(8)


def test_slice_order() -> None:
    order = _C.SliceOrder(num_nodes=2, ranks_per_node=2)
    assert len(order) == 4
    assert order.slots() == [0, 2, 1, 3]
    assert order.slice_of(node=1, local_rank=0) == 1
    assert order.place_of(1) == (1, 0)
    with pytest.raises(_C.InvalidArgument, match="slice 4"):
        order.place_of(4)


def test_pieces_rebuild_every_parameter_from_the_slices() -> None:
    """What a state dict does: copy each piece from its slice, with real tensors."""
    shapes = [(7, 11), (), (0, 4), (129,), (3, 5, 2)]
    generator = torch.Generator().manual_seed(3)
    parameters = [torch.randn(shape, generator=generator) for shape in shapes]
    for num_slices in (1, 2, 3, 8):
        layout = _C.FlatLayout([p.numel() for p in parameters], 4, num_slices)
        table = _C.PieceTable(layout)
        flat = torch.zeros(layout.numel)
        for index, parameter in enumerate(parameters):
            offset = layout.offset_of(index)
            flat[offset : offset + parameter.numel()] = parameter.flatten()
        slices = flat.split(layout.slice_numel)
        assert len(slices) == num_slices
        for index, parameter in enumerate(parameters):
            rebuilt = torch.full((parameter.numel(),), float("nan"))
            for piece in table.of_parameter(index):
                source = slices[piece.slice][piece.slice_begin : piece.slice_begin + piece.numel]
                rebuilt[piece.parameter_begin : piece.parameter_begin + piece.numel] = source
                assert piece in table.in_slice(piece.slice)
            assert torch.equal(rebuilt.view(parameter.shape), parameter)


def test_flat_layout_and_ranges() -> None:
    layout = _C.FlatLayout([40, 3, 30], itemsize_bytes=4, num_slices=2)
    assert (layout.numel, layout.slice_numel, layout.parameter_numel) == (128, 64, 73)
    assert [layout.offset_of(i) for i in range(layout.num_parameters)] == [0, 64, 96]
    assert _C.FLAT_ALIGNMENT_BYTES == 128
    table = _C.PieceTable(layout)
    (piece,) = table.of_range(2, 10, 20)
    assert (piece.slice, piece.slice_begin, piece.numel) == (1, 42, 10)
    assert table.of_slice_range(1, 42, 52) == [piece]
    assert table.of_slice_range(1, 3, 32) == []
    with pytest.raises(_C.InvalidArgument, match=r"\[0, 31\)"):
        table.of_range(2, 0, 31)
