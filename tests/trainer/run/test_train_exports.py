"""Exports in the folder of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.run.storage import EXPORTS_FOLDER, remove_exports


@pytest.mark.parametrize(("process", "is_kept"), [(0, False), (1, True)])
def test_only_process_0_removes_exports(tmp_path: Path, process: int, is_kept: bool):
    (tmp_path / EXPORTS_FOLDER / "10").mkdir(parents=True)
    run: Any = SimpleNamespace(folder=tmp_path, is_process_0=process == 0)
    remove_exports(run)
    assert (tmp_path / EXPORTS_FOLDER).exists() == is_kept
