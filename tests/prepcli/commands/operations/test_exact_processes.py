"""Exact results of Python programs: equal whether JAX was used before or not, or an error."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest

from prepcli.formats.manifest import MANIFEST_FILE
from tests import FLAGS
from tests.helpers.fork_server import ForkedProcess, start_python
from tests.helpers.training_folder import make_training_folder
from trainer.distributed.exact_reduction import WITHOUT_FUSED

WAIT_S = 240.0
USE_JAX = "import jax; jax.numpy.ones(3).sum(); "
TRAIN = """
import os, prepcli as prep
flags = os.environ["XLA_FLAGS"]
try:
    prep.train("recipe.toml", out, overrides=overrides)
except prep.PrepError as error:
    print(error.what, error.why, sep="; ")
assert os.environ["XLA_FLAGS"] == flags
"""
EVALUATE = """
import prepcli as prep
for name in ("evaluate", "harness_model"):
    try:
        if name == "evaluate":
            prep.evaluate("tiny", data="text.txt", reduction="exact", seq_length=16)
        else:
            with prep.harness_model("tiny"):
                pass
    except prep.PrepError as error:
        print(error.what, error.hint, sep="; ")
"""
OVERRIDES = ["train.reduction=exact", "train.steps=3", "data.holdout=0", "mesh=1,8,1"]

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="a flag of x86 processors"
)


def start(script: str, folder: Path, *, out: str = "", flags: str = "") -> ForkedProcess:
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", FLAGS: f"{os.environ[FLAGS]} {flags}".strip()}
    return start_python(
        f"out, overrides = {out!r}, {OVERRIDES!r}\n{script}",
        cwd=folder,
        env=variables,
        has_jax=True,
    )


def output(process: ForkedProcess) -> str:
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_training_folder()
    return tmp_path


def manifest(folder: Path, run: str) -> dict[str, Any]:
    return json.loads((folder / run / "3" / MANIFEST_FILE).read_text())


def test_exact_training_is_equal_or_refused(folder: Path):
    new = start(TRAIN, folder, out="new")
    used = start(USE_JAX + TRAIN, folder, out="used", flags=WITHOUT_FUSED)
    fused = start(USE_JAX + TRAIN, folder, out="fused")
    assert [output(new), output(used)] == ["", ""]
    assert manifest(folder, "new")["tensors"] == manifest(folder, "used")["tensors"]
    assert WITHOUT_FUSED in manifest(folder, "new")["environment"]["xla_flags"]
    assert manifest(folder, "new")["environment"] == manifest(folder, "used")["environment"]
    assert "exact results are not possible in this process; JAX was used before" in output(fused)
    assert not (folder / "fused").exists()


def test_exact_evaluation_is_refused_after_other_use_of_jax(folder: Path):
    pytest.importorskip("lm_eval")
    lines = output(start(USE_JAX + EVALUATE, folder)).splitlines()
    assert len(lines) == 2
    assert all(line.startswith("exact results are not possible in this process") for line in lines)
    assert all(WITHOUT_FUSED in line for line in lines)
