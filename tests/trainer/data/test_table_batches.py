"""Estimated sizes of Arrow values count what they become, not the bytes that they share."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pyarrow as pa
import pytest

from trainer.data.table_batches import UnsupportedTypeError, values_nbytes

ENTRIES = pa.array([[("a", 1)], [("b", 2), ("cc", 3)]], pa.map_(pa.string(), pa.int64()))
UNION = pa.UnionArray.from_sparse(
    pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["a", "b"])]
)


@pytest.mark.parametrize(
    ("array", "nbytes"),
    [
        (pa.array(["a", "bcd", None]), 3 * 8 + 4),
        (pa.array(["aaa", "b" * 100, None], pa.string_view()), 3 * 8 + 103),
        (pa.array(["aaa", "b", "aaa"]).dictionary_encode(), 3 * (8 + 3)),
        (pa.array([1, 2], pa.int8()), 2 * 8),
        (pa.nulls(5), 5 * 8),
        (pa.array([[1, 2], [3], None]), 3 * 8 + 3 * 8),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))[1:], 8 + 2 * 8),
        (pa.array([{"a": "xx"}, {"a": "y"}])[1:], 8 + 8 + 1),
        (ENTRIES[1:], 8 + 2 * (8 + 8 + 8) + 3),
        (pa.array([b"1" * 16], pa.uuid()), 16),
    ],
)
def test_values_nbytes_counts_elements_at_every_depth(array: Any, nbytes: int):
    assert values_nbytes(array) == nbytes


@pytest.mark.parametrize("array", [pa.array([[1]], pa.list_view(pa.int64())), UNION])
def test_values_nbytes_refuses_other_types(array: Any):
    with pytest.raises(UnsupportedTypeError, match="are not supported"):
        values_nbytes(array)


def test_child_process_imports_few_modules():
    """It reads untrusted files, so it holds little code and starts fast."""
    script = (
        "import sys; import trainer.data.table_batches;"
        "print(sum(name.startswith(('prepcli', 'trainer')) for name in sys.modules),"
        " 'pydantic' in sys.modules, 'jax' in sys.modules)"
    )
    command = [sys.executable, "-c", script]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(output[0]) <= 10
    assert output[1:] == ["False", "False"]
