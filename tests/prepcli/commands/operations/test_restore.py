"""Orbax restores the outputs of the commands bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from prepcli.algebra.axis_map import bind_row
from prepcli.algebra.boxes import full_box
from prepcli.commands.cli.main import main
from prepcli.models.parameters import parameter_rows
from prepcli.models.registry import FAMILIES
from tests.helpers.leaf_copies import leaf_box_copies
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import GPT_NEO, LLAMA, make_checkpoint
from tests.prepcli.algebra.test_strided_copies import as_bytes, move
from tests.prepcli.formats.test_orbax import run_orbax


def expected_leaves(
    config: dict, tensors: dict[str, np.ndarray], scan: bool, scan_axis: int
) -> dict[str, np.ndarray]:
    """Assemble every leaf of the tree from the tensors with the axis map. Padding is zeros."""
    family = FAMILIES[config["model_type"]]
    true, padded = config["vocab_size"], -(-config["vocab_size"] // 8) * 8
    leaves = {}
    for path, row in parameter_rows(family, config, scan, scan_axis).items():
        if path == family.tying.head_leaf and family.is_tied(config):
            continue
        bound = bind_row(row, family.sizes(config) | {"vocab": true}, {"vocab": padded})
        for layer in range(3 if "{layers}" in path else 1):
            item = next(iter(tensors.values())).dtype.itemsize
            out = np.zeros(int(np.prod(bound.leaf_shape)) * item, np.uint8)
            fixed = {"layers": layer} if "{layers}" in path else {}
            for name, copy in leaf_box_copies(
                bound, full_box(bound.leaf_shape), itemsize=item, unscanned_indices=fixed
            ):
                full = name if name in family.unprefixed else family.prefix + name
                move(copy, as_bytes(tensors[full]), out)
            dtype = next(iter(tensors.values())).dtype
            leaves[f"params.{path.format(layers=layer)}"] = out.view(dtype).reshape(
                bound.leaf_shape
            )
    return leaves


FAST_LAYOUTS = [
    (GPT_NEO, "float16", ["--mesh", "1,64,4"], True, 0),
    (LLAMA, "bfloat16", ["--mesh", "1,2,4", "--scan-axis", "1"], True, 1),
]
LAYOUTS = [
    *FAST_LAYOUTS,
    (GPT_NEO, "float32", [], True, 0),
    (LLAMA, "bfloat16", ["--mesh", "1,8,1", "--no-scan"], False, 0),
]


@pytest.mark.parametrize(
    ("base", "dtype", "options", "scan", "axis"), slow_except(LAYOUTS, FAST_LAYOUTS)
)
def test_orbax_restores_an_init(tmp_path, monkeypatch, base, dtype, options, scan, axis):
    monkeypatch.chdir(tmp_path)
    tensors = make_checkpoint(Path("m"), base, dtype, hidden_size=64)
    assert main(["save-init", "./m", "--pad-vocab", "8", "-q", *options]) == 0
    if "--mesh" in options and scan and axis == 0:  # via another mesh and back
        assert main(["reshard", "m-init", "--mesh", "1,1,4", "--out", "other", "-q"]) == 0
        assert main(["reshard", "other", *options, "--out", "m-init", "--overwrite", "-q"]) == 0
    config = json.loads(Path("m/config.json").read_text())
    leaves = expected_leaves(config, tensors, scan, axis)
    expected = {
        name: [v.dtype.name, list(v.shape), v.tobytes().hex()] for name, v in leaves.items()
    }
    Path("expected.json").write_text(json.dumps(expected))
    assert not run_orbax("compare", tmp_path / "expected.json", tmp_path / "m-init")
