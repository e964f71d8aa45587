"""`prep verify --quick`: reports only the checks that it made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from tests.helpers.run_cli import run_json
from tests.helpers.tiny_checkpoints import GPT2, make_checkpoint


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("m"), GPT2)


def test_verify_quick_of_a_pair_reports_shapes_not_values(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("other"), GPT2)
    weights = next(Path("other").glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert main(["verify", "./m", "./other", "--quick"]) == 0
    out = capsys.readouterr().out
    assert re.match(r"ok: names, shapes and dtypes of \d+ tensors equal, no values read", out)
    assert "different" not in out
    fields = run_json(capsys, "verify", "./m", "./other", "--quick")
    assert fields["checked"] == ["names", "shapes", "dtypes"]
    assert fields["values"] is None
    assert "differences" not in fields
    assert run_json(capsys, "verify", "./m", "./other")["differences"]


def test_verify_quick_names_a_shape_that_differs(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("wide"), GPT2, n_embd=64)
    fields = run_json(capsys, "verify", "./m", "./wide", "--quick")
    assert "has shapes" in fields["differences"][0]["what"]


def test_verify_quick_of_one_checkpoint_reports_headers(capsys: pytest.CaptureFixture[str]):
    assert main(["save-init", "./m", "--out", "init", "-q"]) == 0
    capsys.readouterr()
    assert main(["verify", "init", "--quick"]) == 0
    out = capsys.readouterr().out
    assert re.match(
        r"ok: headers and file sizes of \d+ tensors, no values read, no digests checked \(", out
    )
    fields = run_json(capsys, "verify", "init", "--quick")
    assert fields["checked"] == ["headers", "file sizes"]
    assert fields["values"] is None
    assert "differences" not in fields


def test_verify_without_quick_reports_values(capsys: pytest.CaptureFixture[str]):
    fields = run_json(capsys, "verify", "./m", "./m")
    assert fields["values"] > 0
    assert fields["differences"] == []
    assert "checked" not in fields
