"""Numbers of slices along the axes of a mesh."""

from __future__ import annotations

import pytest

from prepcli.core.errors import UsageError
from prepcli.models.mesh import check_slices, num_slices, parse_mesh, parse_slice_counts


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
