"""Meshes: parsing, the axis of size -1, the names of their folders, and their slices."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prepcli.core.errors import USAGE, Key, UsageError
from prepcli.models.mesh import (
    MESH_AXES,
    Mesh,
    check_slices,
    folder_suffix,
    num_slices,
    parse_mesh,
    parse_slice_counts,
    resolve_mesh,
)
from tests.helpers.meshes import MESHES, error_of, mesh_texts, read

TAKES = "it takes dp,fsdp,mp, or names: `fsdp:64,mp:4,sp:2`"
SIZE_RANGE = "a size is a number of devices, or -1 for all remaining devices"


@pytest.mark.parametrize(
    ("text", "shown", "mesh"),
    [
        ("1,64,4", "1,64,4", Mesh(("dp", "fsdp", "mp"), (1, 64, 4))),
        (" 1 , 064 , 4 ", "1,64,4", Mesh(("dp", "fsdp", "mp"), (1, 64, 4))),
        ("fsdp:64,mp:4", "1,64,4", Mesh(("dp", "fsdp", "mp"), (1, 64, 4))),
        ("mp:1,fsdp:8", "1,8,1", Mesh(("dp", "fsdp", "mp"), (1, 8, 1))),
        ("dp:8", "8,1,1", Mesh(("dp", "fsdp", "mp"), (8, 1, 1))),
        ("dp:1,fsdp:-1,mp:1,sp:1", "1,-1,1", Mesh(("dp", "fsdp", "mp"), (1, -1, 1))),
        ("mp:4,fsdp:64", "dp:1,mp:4,fsdp:64", Mesh(("dp", "mp", "fsdp"), (1, 4, 64))),
        (
            "fsdp:64,mp:4,sp:2",
            "dp:1,fsdp:64,mp:4,sp:2",
            Mesh(("dp", "fsdp", "mp", "sp"), (1, 64, 4, 2)),
        ),
        (
            "fsdp:64,sp:2,mp:4",
            "dp:1,fsdp:64,sp:2,mp:4",
            Mesh(("dp", "fsdp", "sp", "mp"), (1, 64, 2, 4)),
        ),
        ("!1,8,4", "!1,8,4", Mesh(("dp", "fsdp", "mp"), (1, 8, 4), plain_order=True)),
    ],
)
def test_parse_mesh_normalizes_text(text, shown, mesh):
    assert parse_mesh(text) == mesh
    assert str(mesh) == shown


@given(mesh_texts() | st.sampled_from(["1,-1,4", "mp:-1,dp:2", "sp:-1", "!-1,1,1"]))
def test_parse_mesh_inverts_str(text):
    assert parse_mesh(str(parse_mesh(text))) == parse_mesh(text)


@given(MESHES)
def test_parse_mesh_ignores_axes_of_size_one(mesh):
    larger = [f"{axis}:{size}" for axis, size in zip(mesh.names, mesh.sizes) if size > 1]
    assert (
        parse_mesh(
            "!" * mesh.plain_order
            + ",".join([*larger, *[f"{a}:1" for a in MESH_AXES if mesh.size(a) == 1]])
        )
        == mesh
    )


@given(st.text(max_size=40) | st.text("0123456789-,:! dpfsm", max_size=30))
@example("0" * 5000 + "1,1,1")
@example("9" * 5000 + ",1,1")
def test_parse_mesh_returns_mesh_or_usage_error(text):
    mesh = read(parse_mesh, text)
    assert mesh is None or parse_mesh(str(mesh)) == mesh


@pytest.mark.parametrize(
    ("text", "what", "why", "hint"),
    [
        ("1,64", " has 2 axes", TAKES, "did you mean `1,64,1`?"),
        ("8", " has 1 axis", TAKES, "did you mean `1,8,1`?"),
        ("1,8,2,4", " has 4 axes", TAKES, "did you mean `dp:1,fsdp:8,mp:2,sp:4`?"),
        ("1,x", " has 2 axes", TAKES, "three sizes, as in `1,64,4`"),
        ("1,0", " has 2 axes", TAKES, "three sizes, as in `1,64,4`"),
        ("-1,-1", " has 2 axes", TAKES, "three sizes, as in `1,64,4`"),
        ("1,0,4", ": fsdp is `0`", SIZE_RANGE, "set fsdp to 1 if nothing is to be split over it"),
        ("1,-2,4", ": fsdp is `-2`", SIZE_RANGE, "set fsdp to 1 if nothing is to be split over it"),
        ("dp:two", ": dp is `two`", SIZE_RANGE, "set dp to 1 if nothing is to be split over it"),
        (
            "-1,-1,4",
            " has 2 axes of -1",
            "dp and fsdp cannot all take the remaining devices",
            "use -1 at most once",
        ),
        (
            "fsdq:2,mp:1",
            ": unknown mesh axis `fsdq`",
            "the axes are dp, fsdp, mp, sp",
            "did you mean `fsdp`?",
        ),
        ("tp:2", ": unknown mesh axis `tp`", "the axes are dp, fsdp, mp, sp", "did you mean `mp`?"),
        ("mp:2,mp:4", " names mp twice", "2 and 4", "name each axis at most once"),
        ("1,fsdp:2", " mixes names and bare numbers", "`1` has no name", "name every axis"),
        (
            "1,99999999,1",
            ": fsdp is 99999999",
            "a mesh has at most 1,048,576 devices",
            "use a smaller fsdp",
        ),
        (
            "1,2048,1024",
            " has 2,097,152 devices",
            "a mesh has at most 1,048,576",
            "use smaller sizes",
        ),
    ],
)
def test_parse_mesh_rejects_invalid_text(text, what, why, hint):
    error = error_of(parse_mesh, text)
    assert (error.what, error.why, error.hint, error.code) == (
        f"`--mesh {text}`{what}",
        why,
        hint,
        USAGE,
    )


def test_parse_mesh_error_names_option_or_recipe_key():
    assert error_of(parse_mesh, " ! ").what == "`--mesh` is empty"
    assert error_of(parse_mesh, "1,64", Key("mesh")).what == '`mesh = "1,64"` has 2 axes'


def test_resolve_mesh_fills_open_axis():
    assert resolve_mesh(parse_mesh("1,-1,4"), 256) == parse_mesh("1,64,4")
    assert resolve_mesh(parse_mesh("dp:1,fsdp:8,sp:-1"), 8) == parse_mesh("1,8,1")
    assert resolve_mesh(parse_mesh("!1,64,4"), 256) == parse_mesh("!1,64,4")


def test_resolve_mesh_error_names_both_device_counts():
    error = error_of(resolve_mesh, parse_mesh("1,64,4"), 8, "1 host with 8 × H100")
    assert error.what == "mesh 1,64,4 needs 256 devices, there are 8"
    assert error.why == "1 host with 8 × H100"
    assert error.hint == "`--set mesh=1,8,1`"
    assert error_of(resolve_mesh, parse_mesh("1,64,4"), 8).why == "dp 1 x fsdp 64 x mp 4 = 256"


@pytest.mark.parametrize("n_devices", [0, 2, 6])
def test_resolve_mesh_needs_multiple_of_known_axes(n_devices):
    error = error_of(resolve_mesh, parse_mesh("1,-1,4"), n_devices)
    assert error.what == f"mesh 1,-1,4 needs a multiple of 4 devices, there are {n_devices}"
    assert error.why == "dp 1 x mp 4 = 4"


@pytest.mark.parametrize(
    ("text", "suffix"),
    [
        ("1,64,4", "1x64x4"),
        ("fsdp:64,mp:4,sp:2", "1x64x4-sp2"),
        ("sp:2,mp:4", "dp1-fsdp1-sp2-mp4"),
        ("!1,8,1", "1x8x1-plain"),
    ],
)
def test_folder_suffix_names_sizes_of_the_mesh(text, suffix):
    assert folder_suffix(parse_mesh(text)) == suffix


@given(MESHES, MESHES)
def test_folder_suffix_is_unique_per_mesh(a, b):
    assert (folder_suffix(a) == folder_suffix(b)) == (a == b)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, {}),
        ("dp:2", {"dp": 2}),
        ("2,4,1", {"dp": 2, "fsdp": 4}),
        ("1,1,1", {}),
        ("tp:2", None),
        ("dp:-1", None),
    ],
)
def test_parse_slice_counts_accepts_names_and_positions(
    text: str | None, expected: dict[str, int] | None
):
    if expected is None:
        with pytest.raises(UsageError, match=r"cluster\.dcn_mesh"):
            parse_slice_counts(text)
    else:
        assert parse_slice_counts(text) == expected


@pytest.mark.parametrize(
    ("mesh", "slices", "is_valid"),
    [
        ("4,8,1", {"dp": 2}, True),
        ("4,8,1", {"dp": 4, "fsdp": 2}, True),
        ("-1,8,1", {"dp": 3}, True),
        ("4,8,1", {"dp": 3}, False),
        ("4,8,1", {"mp": 2}, False),
    ],
)
def test_check_slices_rejects_sizes_that_do_not_divide(
    mesh: str, slices: dict[str, int], is_valid: bool
):
    if is_valid:
        check_slices(parse_mesh(mesh), slices)
    else:
        with pytest.raises(UsageError, match="divides"):
            check_slices(parse_mesh(mesh), slices)


def test_num_slices_is_the_product():
    assert num_slices({"dp": 2, "fsdp": 3}) == 6
    assert num_slices({}) == 1
