"""Small outputs of commands: lock files, maps, certificates, pages and scripts are local files."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from prepcli.core.errors import USAGE
from tests.helpers.run_cli import run_failing
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint

COMMANDS = (
    "lock ./model --out gs://bucket/result",
    "lock ./model --html gs://bucket/result",
    "inspect ./model --html gs://bucket/result",
    "roundtrip ./model --out gs://bucket/result",
    "map suggest ./model ./model --out gs://bucket/result",
    "plan ./model --html gs://bucket/result",
    "report run --out gs://bucket/result",
    "recipes copy llama-7b --out gs://bucket/result",
    "launch slurm --out gs://bucket/result -- save-init ./model",
    "demo --out gs://bucket/result",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_small_outputs_in_a_bucket_are_refused(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("model"), LLAMA)
    error = run_failing(capsys, USAGE, *shlex.split(command))
    assert "cannot write gs://bucket/result" in error
    assert "name a local path" in error
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
