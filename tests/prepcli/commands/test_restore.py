"""Plain Orbax restores what the commands write, in every way that it has, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from prepcli.cli.main import main
from prepcli.planning.boxes import whole
from prepcli.planning.moves import pieces
from tests.helpers.models import GPT_NEO, LLAMA, make
from tests.prepcli.formats.test_orbax import judge
from tests.prepcli.planning.test_moves import as_bytes, move
from trainer.models.axis_map import bind
from trainer.models.parameters import rows
from trainer.models.registry import FAMILIES


def leaves_of(config: dict, tensors: dict[str, np.ndarray], scan: bool, scan_axis: int) -> dict[str, np.ndarray]:
    """Every leaf of the tree, put together by the index algebra alone; padding is zeros."""
    family = FAMILIES[config["model_type"]]
    true, padded = config["vocab_size"], -(-config["vocab_size"] // 8) * 8
    found = {}
    for path, row in rows(family, config, scan, scan_axis).items():
        if path == family.tie.leaf and family.tied(config):
            continue
        bound = bind(row, family.sizes(config) | {"vocab": true}, {"vocab": padded})
        for layer in range(3 if "{layers}" in path else 1):
            item = next(iter(tensors.values())).dtype.itemsize
            out = np.zeros(int(np.prod(bound.leaf_shape)) * item, np.uint8)
            at = {"layers": layer} if "{layers}" in path else {}
            for name, copy in pieces(bound, whole(bound.leaf_shape), item, at):
                full = name if name in family.unprefixed else family.prefix + name
                move(copy, as_bytes(tensors[full]), out)
            dtype = next(iter(tensors.values())).dtype
            found[f"params.{path.format(layers=layer)}"] = out.view(dtype).reshape(bound.leaf_shape)
    return found


@pytest.mark.parametrize(
    ("base", "dtype", "options", "scan", "axis"),
    [
        (GPT_NEO, "float32", [], True, 0),
        (GPT_NEO, "float16", ["--mesh", "1,64,4"], True, 0),
        (LLAMA, "bfloat16", ["--mesh", "1,2,4", "--scan-axis", "1"], True, 1),
        (LLAMA, "bfloat16", ["--mesh", "1,8,1", "--no-scan"], False, 0),
    ],
)
def test_orbax_restores_an_init(tmp_path, monkeypatch, base, dtype, options, scan, axis):
    monkeypatch.chdir(tmp_path)
    tensors = make(Path("m"), base, dtype, hidden_size=64)
    assert main(["save-init", "./m", "--pad-vocab", "8", "-q", *options]) == 0
    if "--mesh" in options and scan and axis == 0:  # through another mesh, and back to this one
        assert main(["reshard", "m-init", "--mesh", "1,1,4", "--out", "other", "-q"]) == 0
        assert main(["reshard", "other", *options, "--out", "m-init", "--overwrite", "-q"]) == 0
    config = json.loads(Path("m/config.json").read_text())
    leaves = leaves_of(config, tensors, scan, axis)
    expected = {name: [v.dtype.name, list(v.shape), v.tobytes().hex()] for name, v in leaves.items()}
    Path("expected.json").write_text(json.dumps(expected))
    judge("judge", tmp_path / "expected.json", tmp_path / "m-init")
