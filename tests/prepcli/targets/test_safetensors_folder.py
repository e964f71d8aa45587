"""Safetensors files of a folder: headers, page offsets and the index."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prepcli.models.registry import FAMILIES
from prepcli.sources.source import Source, SourceTensor
from prepcli.sources.tensor_match import TensorNames
from prepcli.targets.planner import output_rows
from prepcli.targets.safetensors_folder import (
    header_entries,
    index_files,
    lay_out_weight_files,
    resized_shape_and_nbytes,
)
from tests.helpers.plans import flat

FAMILY = FAMILIES["gpt_neo"]


def tensor(name: str, *shape: int, dtype: str = "float32") -> SourceTensor:
    return SourceTensor(name, dtype, shape, (flat(dtype, shape, 8),))


@pytest.mark.parametrize(
    ("shape", "rows", "expected"),
    [
        ((131, 4), 136, ((136, 4), 136 * 16)),
        ((136, 4), 131, ((131, 4), 131 * 16)),
        ((131,), 136, ((136,), 136 * 4)),
        ((), 1, ((), 4)),
        ((0, 5), 0, ((0, 5), 0)),
        ((5, 0), 7, ((7, 0), 0)),
    ],
)
def test_resized_shape_changes_the_rows(
    shape: tuple[int, ...], rows: int, expected: tuple[tuple[int, ...], int]
):
    assert resized_shape_and_nbytes(tensor("w", *shape), rows) == expected


def test_output_rows_change_for_vocabulary_tensors_only():
    tensors = [
        tensor("wte.weight", 131, 4),
        tensor("lm_head.weight", 131, 4),
        tensor("ln_f.bias", 131),
        tensor("s"),
    ]
    rows = output_rows(tensors, {"wte.weight", "lm_head.weight"}, vocab_size=136)
    assert rows == {"wte.weight": 136, "lm_head.weight": 136, "ln_f.bias": 131, "s": 1}
    source = Source(
        "m", Path("m"), FAMILY, {}, TensorNames(FAMILY), tuple(tensors), (), (), (), None
    )
    assert header_entries(source, tensors[:2], rows=rows) == [
        ("transformer.wte.weight", "float32", (136, 4), 136 * 16),
        ("lm_head.weight", "float32", (136, 4), 136 * 16),
    ]


def test_files_have_the_requested_page_offset():
    groups = [
        ("a.safetensors", [("x", "float32", (3,), 12), ("y", "float16", (), 2)], 96),
        ("b.safetensors", [], None),
    ]
    files, places, layouts = lay_out_weight_files(groups)
    assert [file.path for file in files] == ["a.safetensors", "b.safetensors"]
    assert places["x"].offset % 4096 == 96
    assert places["y"].position == (0, places["x"].offset + 12)
    assert files[0].size == places["y"].offset + 2
    assert files[0].header == layouts[0].header


def test_one_weight_file_has_no_index():
    _, _, layouts = lay_out_weight_files(
        [("model.safetensors", [("t0", "float32", (3,), 12)], 0)],
    )
    assert index_files(layouts) == ()


def test_several_weight_files_have_an_index():
    _, _, layouts = lay_out_weight_files(
        [
            ("0.safetensors", [("t0", "float32", (3,), 12)], 0),
            ("1.safetensors", [("t1", "float32", (3,), 12)], 0),
        ]
    )
    (file,) = index_files(layouts)
    index = json.loads(file.content)
    assert file.path == "model.safetensors.index.json"
    assert index["weight_map"] == {"t0": "0.safetensors", "t1": "1.safetensors"}
    assert index["metadata"]["total_size"] == 24
