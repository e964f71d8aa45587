"""Drawings of the devices that hold each slice."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.inspection.shard_map import draw_shard_map, summarize_sharding
from prepcli.models.mesh import parse_mesh
from prepcli.models.partition import partition_spec
from prepcli.models.rules import PARAM_RULES, merge_rules


def draw_lines(
    dims: str, shape, mesh: str, dtype="float32", rules=PARAM_RULES, name="leaf"
) -> list[str]:
    grid = parse_mesh(mesh)
    leaf_spec = partition_spec([(dim,) for dim in dims.split()], shape, grid, rules)
    return draw_shard_map(name, shape, dtype, leaf_spec, grid).split("\n")


def test_draw_shows_a_matrix_split_both_ways():
    assert draw_lines("vocab embed", (50264, 2048), "1,2,4", name="embed.tokens") == [
        "embed.tokens  [50264, 2048] float32  P(mp, fsdp)  49.1 MiB per device, 1 copy",
        "vocab down; embed across",
        " 0:1024               1024:2048",
        "┌────────────────────┬────────────────────┐",
        "│ 0                  │ 4                  │  0:12566",
        "├────────────────────┼────────────────────┤",
        "│ 1                  │ 5                  │  12566:25132",
        "├────────────────────┼────────────────────┤",
        "│ 2                  │ 6                  │  25132:37698",
        "├────────────────────┼────────────────────┤",
        "│ 3                  │ 7                  │  37698:50264",
        "└────────────────────┴────────────────────┘",
    ]


def test_draw_shows_the_first_and_last_of_many_columns():
    lines = draw_lines("vocab embed", (32000, 5120), "1,64,4", "bfloat16")
    assert lines[2] == " 0:80                 × 62                 5040:5120"
    assert lines[4] == "│ 0                  │ …                  │ 252                │  0:8000"
    assert (
        lines[-2] == "│ 3                  │ …                  │ 255                │  24000:32000"
    )


def test_draw_omits_rows_between_first_and_last():
    lines = draw_lines("embed", (4096,), "1,128,1")
    assert lines[3::2] == [
        "│ 0                  │  0:32",
        "│ …                  │  × 126",
        "│ 127                │  4064:4096",
    ]


def test_draw_shows_up_to_64_cells():
    assert len(draw_lines("embed", (4096,), "1,64,1")) == 2 + 2 * 64 + 1
    assert len(draw_lines("embed", (4160,), "1,65,1")) == 2 + 2 * 3 + 1


def test_draw_shows_copies_and_names_whole_dims():
    lines = draw_lines("layers heads head_dim embed", (32, 32, 128, 4096), "2,2,2")
    assert lines[:3] == [
        "leaf  [32, 32, 128, 4096] float32  P(None, mp, None, fsdp)",
        "  512 MiB per device, 2 copies",
        "heads down; embed across; whole: layers, head_dim",
    ]
    assert lines[-4:] == [
        "│ 0,4                │ 2,6                │  0:16",
        "├────────────────────┼────────────────────┤",
        "│ 1,5                │ 3,7                │  16:32",
        "└────────────────────┴────────────────────┘",
    ]


def test_draw_omits_columns_without_room_for_ranges():
    assert (
        draw_lines("norm embed", (8, 4096), "1,8,1")[2]
        == " 0:512                × 6                  3584:4096"
    )
    assert draw_lines("norm embed", (8, 800), "1,8,1")[2].split() == [
        f"{i * 100}:{i * 100 + 100}" for i in range(8)
    ]


def test_draw_never_omits_one_of_two_parts():
    lines = draw_lines("norm embed", (8, 2 * 10**12), "1,2,1")
    assert lines[2] == " 0:1000000000000      1000000000000:20000…"
    assert lines[4] == "│ 0                  │ 1                  │"


def test_draw_shows_a_lone_last_dim_horizontally():
    lines = draw_lines("layers mlp embed", (4, 8, 4096), "1,2,1")
    assert lines[1:] == [
        "embed across; whole: layers, mlp",
        " 0:2048               2048:4096",
        "┌────────────────────┬────────────────────┐",
        "│ 0                  │ 1                  │",
        "└────────────────────┴────────────────────┘",
    ]


@pytest.mark.parametrize(("dims", "shape"), [("norm", (32,)), ("", ())])
def test_draw_shows_an_unpartitioned_leaf_as_one_cell(dims, shape):
    lines = draw_lines(dims, shape, "2,4,8")
    assert lines[0].endswith("per device, 64 copies")
    assert lines[1:] == [
        "┌────────────────────┐",
        "│ 0-63               │",
        "└────────────────────┘",
    ]


def test_draw_counts_devices_that_do_not_fit_a_cell():
    lines = draw_lines("mlp", (64,), "dp:1,fsdp:32,mp:2")
    assert lines[3] == "│ 0…62 ×32           │  0:32"


def test_draw_shows_the_first_part_of_a_third_dim():
    lines = draw_lines(
        "experts mlp embed", (8, 14336, 4096), "2,4,2", rules=merge_rules(["experts=dp"]).params
    )
    assert lines[1] == "mlp down; embed across; experts in 2 parts over dp, this is 0:4"
    assert [int(n) for line in lines[4::2] for n in re.findall(r"│ (\d+) ", line)] == [
        0,
        2,
        4,
        6,
        1,
        3,
        5,
        7,
    ]


@given(
    st.text("abcdefgh.", min_size=1, max_size=120),
    st.tuples(*[st.sampled_from([1, 2, 3, 8, 64, 256])] * 3).filter(
        lambda sizes: math.prod(sizes) <= 2048
    ),
    st.lists(st.integers(1, 10**9), min_size=3, max_size=3),
    st.sampled_from(["vocab embed", "layers heads embed", "experts mlp embed"]),
)
def test_draw_fits_80_columns_with_aligned_rows(name, sizes, multiples, dims):
    shape = tuple(m * 768 for m in multiples[: len(dims.split())])
    lines = draw_lines(
        dims, shape, ",".join(map(str, sizes)), rules=merge_rules(["experts=dp"]).params, name=name
    )
    assert all(0 < len(line) <= 80 for line in lines)
    frame = [line for line in lines if line[0] in "┌├└"]
    rows = [line for line in lines if line[0] == "│"]
    assert (
        {len(line) for line in frame} == {line.rindex("│") + 1 for line in rows} == {len(frame[0])}
    )
    assert len(rows) * (rows[0].count("│") - 1) <= 64


def test_summarize_is_short_for_a_million_devices():
    mesh = parse_mesh("1048576,1,1")
    spec_of_leaf = partition_spec((("vocab",), ("embed",)), (264, 512), mesh, PARAM_RULES)
    text = summarize_sharding("embed.tokens", (264, 512), "float32", spec_of_leaf, mesh)
    assert "not drawn: the mesh has 1,048,576 devices" in text
    assert len(text.splitlines()) <= 4
