"""Conversions with rules of leaves and presets: chunks, manifests, padding, shard maps and loaded parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import USAGE
from tests.helpers.run_cli import error_lines, run_json, run_ok
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint, read_tensors, same_bits

QUERY_RULE = r"re:^layers\.attn\.(q|k|v)\.weight$=none,fsdp,mp"
# a query weight of 1 MiB
WIDE: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 1, "num_key_value_heads": 8}
QUERY, OUTPUT = "params.layers.attn.q.weight", "params.layers.attn.o.weight"


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read_manifest(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "prep-manifest.json").read_text())


def chunk_of(folder: str, leaf: str) -> list[int]:
    """Return the chunk shape of a leaf."""
    return read_manifest(folder)["leaves"][leaf]["chunk"]


def test_chunks_follow_rules_of_leaves_in_every_layout(capsys: pytest.CaptureFixture[str]):
    tensors = make_checkpoint(Path("m"), LLAMA, **WIDE)
    pad, mesh = ("--pad-vocab", "auto"), ("--mesh", "1,2,4")
    run_ok("save-init", "m", *mesh, *pad, "--rule", QUERY_RULE, "--out", "init")
    assert (chunk_of("init", QUERY), chunk_of("init", OUTPUT)) == ([1, 8, 32, 128], [1, 256, 2, 64])
    assert read_manifest("init")["rules"] == [QUERY_RULE]
    run_ok("reshard", "init", "--no-scan", "--mesh", "1,4,2", "--out", "unstacked")
    assert chunk_of("unstacked", QUERY.replace("layers", "layers.0")) == [8, 16, 256]
    run_ok(
        "reshard",
        "unstacked",
        "--scan",
        "--scan-axis",
        "1",
        *mesh,
        "--rule",
        "auto",
        "--out",
        "by-size",
    )
    assert (chunk_of("by-size", QUERY), chunk_of("by-size", OUTPUT)) == (
        [8, 1, 32, 128],
        [128, 1, 8, 32],
    )
    run_ok("verify", "by-size")
    run_ok("export", "by-size", "--out", "back")
    assert all(
        same_bits(array, tensors[name]) for name, array in read_tensors(Path("back")).items()
    )
    shards = run_json(capsys, "inspect", "init", "--shards", "attn.q.weight")["shards"]
    assert (shards["spec"], shards["shard"]) == ("P(None, None, fsdp, mp)", [1, 8, 32, 128])


def test_padding_fits_rules_of_vocabulary_leaves():
    make_checkpoint(Path("m"), LLAMA)
    rule = r"re:^(embed\.tokens|head\.weight)$=fsdp+mp,none"
    run_ok(
        "save-init",
        "m",
        "--mesh",
        "1,3,4",
        "--pad-vocab",
        "auto",
        "--rule",
        rule,
        "--rule",
        "embed=none",
        "--out",
        "i",
    )
    assert read_manifest("i")["vocab"] == {"true": 131, "padded": 132}
    run_ok("save-init", "m", "--mesh", "1,2,4", "--pad-vocab", "auto", "--rule", rule, "--out", "j")
    assert read_manifest("j")["vocab"] == {"true": 131, "padded": 136}


def test_rule_without_leaf_is_an_error(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("m"), LLAMA)
    options = ("save-init", "m", "--mesh", "1,1,1")
    assert main([*options, "--rule", r"re:^layers\.atn\.q\.weight$=mp,none,none", "-q"]) == USAGE
    lines = error_lines(capsys, *options, "--rule", r"re:^layers\.atn\.q\.weight$=mp,none,none")
    assert lines[0] == r"error: `re:^layers\.atn\.q\.weight$=mp,none,none` matches no leaf"
    assert "did you mean `layers.attn.q.weight`?" in lines[-1]


@pytest.mark.parametrize("rules", [[QUERY_RULE], ["flaxlm:2,2"], ["auto"]])
def test_load_params_places_shards_by_stored_rules(rules: list[str]):
    tensors = make_checkpoint(Path("m"), LLAMA, vocab_size=136)
    init = prep.save_init("m", out="init", mesh="1,2,4", rules=rules)
    params = prep.load_params(init.path, mesh="1,2,4")
    q = params["layers"]["attn"]["q"]["weight"]
    expected = {"auto": (3, 4, 4, 8), "flaxlm:2,2": (3, 2, 4, 16)}.get(rules[0], (3, 8, 2, 8))
    assert q.addressable_shards[0].data.shape == expected
    up = params["layers"]["mlp"]["up"]["weight"]
    assert np.array_equal(np.asarray(up)[0], tensors["model.layers.0.mlp.up_proj.weight"])
