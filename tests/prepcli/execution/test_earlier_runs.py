"""What an earlier version left half-done: runs of training are resumed, conversions ask for `--restart`.

`tests/golden/interrupted.tar.gz` is from commit a90830a6. `tests/golden/make_interrupted.py` describes it.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest

from tests.golden.make_interrupted import ARCHIVE, CONVERSIONS, STOP_AFTER, TRAIN
from tests.helpers.archives import extract_all
from tests.helpers.killing import read_files
from tests.helpers.run_cli import run_failing, run_json, run_ok
from tests.helpers.training_states import read_params

MANIFEST = "prep-manifest.json"


@pytest.fixture
def earlier_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Extract the archive with its times, and make it the working directory."""
    with tarfile.open(ARCHIVE) as archive:
        extract_all(archive, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", CONVERSIONS)
def test_half_done_output_of_an_earlier_version_needs_restart(
    name: str, earlier_folder: Path, capsys: pytest.CaptureFixture[str]
):
    command = (*CONVERSIONS[name], "--out", name)
    before = read_files(Path(f"{name}.partial"))
    del before[".prep/lock"]
    error = run_failing(capsys, 1, *command)
    assert f"{name}.partial belongs to another run" in error
    assert "another version of prep" in error
    assert "--restart" in error
    assert read_files(Path(f"{name}.partial")).items() >= before.items()
    run_ok(*command, "--restart")
    assert not Path(f"{name}.partial").exists()
    written = read_files(Path(name))
    expected = read_files(Path("whole") / name)
    # newer manifests also list the digests of small files
    del written[MANIFEST]
    del expected[MANIFEST]
    assert written == expected


def test_run_of_an_earlier_version_is_resumed(
    earlier_folder: Path, capsys: pytest.CaptureFixture[str]
):
    report = run_json(capsys, *TRAIN, "--out", "run")
    assert report["resumed_at"] == STOP_AFTER
    resumed = read_params(Path("run/6"))
    expected = read_params(Path("whole/run/6"))
    assert resumed.keys() == expected.keys()
    for name, value in expected.items():
        # other CPUs may round products otherwise
        np.testing.assert_allclose(resumed[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
