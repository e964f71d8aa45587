"""`prep check-family`: its lines, exit codes and errors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bench.published import PUBLISHED
from prepcli.commands.cli.main import main
from prepcli.commands.testing import checks
from prepcli.models.parameters import Parameter
from prepcli.models.registry import FAMILIES
from tests.helpers.tiny_configs import MISTRAL, ODD_HEADS
from tests.helpers.wrong_family import use_family

FAST = ["coverage", "round trip", "forward pass"]
FAST_OPTIONS = [word for name in FAST for word in ("--check", name)]


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    """Return the path of a tiny config of Mistral."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MISTRAL))
    return path


def test_check_family_command_passes_valid_family(
    config_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["check-family", str(config_path), *FAST_OPTIONS]) == 0
    out, err = capsys.readouterr()
    assert [line.split("  ")[0] for line in out.splitlines()] == ["mistral", *FAST]
    assert [line.split()[-3] for line in out.splitlines()[1:2]] == ["passed"]
    assert "mistral: vocab 29, layers 2, embed 24" in err


def test_check_family_command_compares_with_transformers(
    config_path: Path, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    assert (
        main(
            [
                "check-family",
                str(config_path),
                "--check",
                "names and shapes",
                "--check",
                "logits",
                "--json",
            ]
        )
        == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert [(result["check"], result["outcome"]) for result in document["checks"]] == [
        ("names and shapes", "passed"), ("logits", "passed"),
    ]  # fmt: skip
    assert document["checks"][0]["text"] == "21 tensors"
    assert float(document["checks"][1]["text"]) <= 2e-5


def test_folder_of_a_large_model_is_scaled_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["llama-3-8b"]))
    assert main(["check-family", str(tmp_path), *FAST_OPTIONS, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["family"] == "llama"
    assert document["config"]["hidden_size"] == 144
    assert {result["outcome"] for result in document["checks"]} == {"passed"}


def test_broken_row_fails_with_the_reason(
    config_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    right = FAMILIES["mistral"]
    row = Parameter("layers mlp embed <- layers.{layers}.mlp.gate.weight: mlp embed")
    wrong = dataclasses.replace(
        right, parameters={**right.parameters, "layers.mlp.gate.weight": row}
    )
    use_family(wrong, monkeypatch)
    assert (
        main(
            ["check-family", str(config_path), "--check", "coverage", "--check", "names and shapes"]
        )
        == 1
    )
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split()[:2] == ["coverage", "passed"]
    assert "failed" in out.splitlines()[2]
    assert "error: mistral fails 1 of 2 checks" in err
    assert (
        "names and shapes: model.layers.0.mlp.gate.weight: [20, 24], transformers has None" in err
    )


def test_skipped_checks_are_not_passed(
    config_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(checks, "missing_reference_packages", lambda: ["torch", "transformers"])
    assert main(["check-family", str(config_path), "--check", "logits"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert (
        line
        == "logits   skipped  torch and transformers not installed: pip install 'prepcli[hf]' torch"
    )


def test_check_family_command_warns_about_even_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "even.json"
    path.write_text(json.dumps(ODD_HEADS["gpt2"] | {"vocab_size": 32}))
    assert main(["check-family", str(path), "--check", "coverage"]) == 0
    assert (
        "vocab of the tiny model is 32; an odd number finds more mistakes"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("text", "options", "code", "message"),
    [
        ('{"model_type": "zamba2"}', [], 1, "model_type `zamba2` is not supported"),
        ('{"model_type": "lama"}', [], 1, "the most similar family is llama"),
        ("{", [], 1, "config.json is broken"),
        ("[]", [], 1, "it is not a JSON object"),
        ('{"model_type": "llama", "vocab_size": 0}', [], 1, "vocab_size is 0"),
        (None, [], 2, "config.json does not exist"),
        ("{}", ["--check", "logit"], 2, "did you mean `logits`?"),
    ],
)
def test_check_family_command_reports_one_error(
    text: str | None,
    options: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    assert main(["check-family", str(path), *options]) == code
    out, err = capsys.readouterr()
    assert (out, err.count("error:")) == ("", 1)
    assert message in err
