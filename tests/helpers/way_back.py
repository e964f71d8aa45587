"""The way back of an export in the layout of another library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tests.helpers.run_cli import run_ok
from tests.helpers.tiny_checkpoints import assert_same, read_tensors


def check_way_back(tensors: Mapping[str, np.ndarray]) -> None:
    """Verify the export `out` of `./model`, convert it again, and compare the tensors of its own export."""
    run_ok("verify", "out")
    run_ok("verify", "out", "./model")
    run_ok("save-init", "out", "--out", "init", "--mesh", "1,2,1")
    run_ok("verify", "init", "out")
    run_ok("export", "init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)
