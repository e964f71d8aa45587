"""Recorded digests that do not cover all rows of a tensor, each once, are refused by every reader."""

from __future__ import annotations

from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from tests.helpers.manifests import changed_manifest
from tests.helpers.run_cli import error_lines, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint, read_tensors

NAME = "model.layers.0.self_attn.q_proj.weight"
READERS = {
    "verify": ("verify", "init"),
    "pair": ("verify", "init", "./m"),
    "lock": ("lock", "init"),
    "export": ("export", "init", "--out", "hf"),
    "reshard": ("reshard", "init", "--no-scan", "--out", "other"),
}
# Ranges of rows of a tensor with 32 rows. Ranges that do not follow each other are refused with the manifest, and only
# the tensor has the number of rows.
ROWS = {
    "none": [(0, 0)],
    "first missing": [(1, 32)],
    "last missing": [(0, 31)],
    "gap": [(0, 5), (6, 32)],
    "overlap": [(0, 6), (5, 32)],
    "too many": [(0, 33)],
}


@pytest.mark.parametrize("reader", slow_except(list(READERS), ["verify", "lock"]))
@pytest.mark.parametrize("rows", slow_except(list(ROWS), ["none", "gap"]))
def test_digests_of_other_rows_are_refused(
    reader: str,
    rows: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("m"), LLAMA)
    run_ok("save-init", "./m", "--out", "init")
    values = read_tensors(Path("m"))[NAME]
    assert len(values) == 32
    # Each digest is the one of its rows, so that only their ranges are wrong.
    digests = [
        [low, high, xxh3_128_hexdigest(values[low:high].tobytes())] for low, high in ROWS[rows]
    ]
    with changed_manifest(Path("init")) as manifest:
        manifest["tensors"][NAME]["digests"] = digests
    capsys.readouterr()
    lines = error_lines(capsys, *READERS[reader])
    if rows in ("none", "last missing", "too many"):
        assert lines[0].startswith("error: the manifest records ")
        assert "layers.0.self_attn.q_proj.weight" in lines[0]
        assert lines[1].startswith("  why: the tensor has 32 rows")
    else:
        assert lines[0] == "error: init/prep-manifest.json is broken"
        assert NAME in lines[1]
