"""Behaviour shared by the converting commands."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prepcli.commands.cli.main import main
from prepcli.commands.operations.checkpoint_options import source_line
from prepcli.sources.source import SourceTensor
from tests.helpers.run_cli import exported_tensors, run_failing, run_json, run_ok
from tests.helpers.tiny_checkpoints import (
    FAMILY_CONFIGS,
    GPT_NEO,
    LLAMA,
    assert_same,
    make_checkpoint,
)


class CountingTensors(tuple[SourceTensor, ...]):
    """Tuple of tensors that counts its iterations."""

    num_iterations = 0

    def __iter__(self) -> Any:
        CountingTensors.num_iterations += 1
        return super().__iter__()


def test_source_line_lists_dtypes_of_large_tensors():
    biases = [SourceTensor(f"bias{i}", "float32", (1,), ()) for i in range(50)]
    weights = [
        SourceTensor(f"w{i}", dtype, (8, 8), ()) for i, dtype in enumerate(("bfloat16", "float16"))
    ]
    source: Any = SimpleNamespace(
        display_name="o/m", family=SimpleNamespace(name="llama"), files=("a", "b"),
        tensors=CountingTensors([*weights, *biases]),
        tower_tensors=(), state_tensors=(), extra_entries=(), quantization={}, wrapper=None,
    )  # fmt: skip
    assert source_line(source) == "o/m  llama  52 tensors  456 bytes bfloat16, float16  2 files"
    assert CountingTensors.num_iterations < 10


@pytest.mark.parametrize("command", ["save-init", "pad-vocab"])
def test_conversion_warns_of_a_config_that_cannot_be_computed(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    make_checkpoint(tmp_path / "odd", LLAMA, clip_qkv=8.0)
    words = (command, str(tmp_path / "odd"), "--out", str(tmp_path / "out"), "--dry-run")
    assert main([*words]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "not trained" in line]
    assert "`clip_qkv` is not supported" in line
    report = run_json(capsys, *words)
    assert "clip_qkv" in report["not_computed"]
    assert report["warnings"] == [line.removeprefix("warning: ")]


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {"hidden_act": "tanh"}, "activation `tanh` is not supported"),
        ("llama", {"hidden_act": "laplace"}, "activation `laplace` is not supported"),
        ("gpt_neox", {"rotary_pct": 0.2}, "3 elements of a head are to be rotated"),
        (
            "qwen2",
            {"layer_types": ["sliding_attention"] * 3, "sliding_window": None},
            "there is no sliding_window",
        ),
    ],
)
def test_warning_has_the_reason_that_computations_refuse(
    family: str,
    changes: dict[str, Any],
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    config = FAMILY_CONFIGS.get(family, LLAMA) | (
        {"use_sliding_window": True} if family == "qwen2" else {}
    )
    make_checkpoint(tmp_path / "odd", config, **changes)
    warnings = run_json(capsys, "save-init", str(tmp_path / "odd"), "--out", str(tmp_path / "out"))[
        "warnings"
    ]
    (warning,) = [text for text in warnings if "not trained" in text]
    assert reason in warning
    assert reason in run_failing(capsys, 1, "plan", str(tmp_path / "out"), "--mesh", "1,1,1")


def test_save_init_does_not_warn_about_a_supported_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    make_checkpoint(tmp_path / "plain", LLAMA)
    words = ("save-init", str(tmp_path / "plain"), "--out", str(tmp_path / "out"), "--dry-run")
    assert main([*words]) == 0
    assert "not trained" not in capsys.readouterr().err
    assert run_json(capsys, *words)["not_computed"] is None


@pytest.mark.parametrize("year", [1901, 1960])
def test_sources_older_than_1970_are_converted(
    year: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tensors = make_checkpoint(tmp_path / "m", GPT_NEO)
    seconds = datetime(year, 1, 1, tzinfo=UTC).timestamp()
    for path in (tmp_path / "m").iterdir():
        os.utime(path, (seconds, seconds))
    run_ok("save-init", "./m", "--out", "init")
    run_ok("verify", "init", "./m")
    assert_same(exported_tensors("init"), tensors)
