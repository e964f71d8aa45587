"""`prep pad-vocab`: the number of new rows and their values."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prepcli.commands.cli.main import main
from prepcli.commands.operations.options import PadVocabOptions
from prepcli.commands.operations.pad_vocab import make_fill, padded_size
from prepcli.core.errors import FAILED, USAGE, PrepError
from prepcli.core.option_spec import with_defaults
from prepcli.engine.fills import Fill
from prepcli.models.registry import FAMILIES
from prepcli.sources.source import Source
from prepcli.sources.tensor_match import TensorNames, Vocabulary
from tests.helpers.run_cli import run_failing, run_json, run_ok
from tests.helpers.tiny_checkpoints import (
    GPT_NEO,
    checkpoint_tensors,
    make_checkpoint,
    read_tensors,
    same_bits,
    write_checkpoint,
)

FAMILY = FAMILIES["gpt_neo"]


def padded_rows(**values: Any) -> int:
    """Return the padded size of a vocabulary of 131 tokens, stored with 136 rows."""
    options: Any = with_defaults(PadVocabOptions, values)
    return padded_size(options, Vocabulary(131, 136))


def make_source(**config: Any) -> Source:
    return Source("m", Path("m"), FAMILY, config, TensorNames(FAMILY), (), (), (), (), None)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 136),
        ({"multiple": 128}, 256),
        ({"multiple": 131}, 131),
        ({"size": 131}, 131),
        ({"size": 200}, 200),
        ({"mesh": "1,1,4"}, 132),
        ({"mesh": "1,64,4", "multiple": 1000}, 132),
    ],
)
def test_padded_size_starts_from_true_rows(options: dict[str, Any], size: int):
    assert padded_rows(**options) == size


def test_size_below_true_rows_is_rejected():
    with pytest.raises(PrepError, match="size=130") as caught:
        padded_rows(size=130)
    assert caught.value.code == USAGE


@pytest.mark.parametrize("option", [("--multiple", "1000000"), ("--size", "2147483647")])
def test_lack_of_space_is_found_before_work(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: tuple[str, str],
):
    def refuse_work(*_: object) -> None:
        raise AssertionError("the coverage check began")

    make_checkpoint(tmp_path / "m", GPT_NEO)
    monkeypatch.setattr("prepcli.planning.coverage.check", refuse_work)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**6))
    err = run_failing(
        capsys, FAILED, "pad-vocab", str(tmp_path / "m"), *option, "--out", str(tmp_path / "out")
    )
    assert err.startswith("error: not enough room for out\n")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_copy_without_new_rows_is_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make_checkpoint(tmp_path / "m", GPT_NEO, vocab_size=128)
    assert (
        main(
            [
                "pad-vocab",
                str(tmp_path / "m"),
                "--multiple",
                "8",
                "--out",
                str(tmp_path / "out"),
                "--dry-run",
            ]
        )
        == 0
    )
    assert re.search(
        r"128 -> 128: nothing to add, the output is a full copy of \S+ \wiB\n",
        capsys.readouterr().err,
    )


def test_make_fill_returns_kind_seed_and_deviation():
    assert make_fill("zeros", 5, make_source()) == Fill("zeros")
    assert make_fill("mean", 5, make_source(initializer_range="odd")) == Fill("mean")
    assert make_fill("normal", 5, make_source()) == Fill("normal", 5, 0.02)
    assert make_fill("normal", 2**64 - 1, make_source(initializer_range=1)) == Fill(
        "normal", 2**64 - 1, 1.0
    )


@pytest.mark.parametrize(
    ("init", "seed", "config", "text", "code"),
    [
        ("ones", 0, {}, "unknown `--init ones`", USAGE),
        ("normal", 2**64, {}, "`--seed 18446744073709551616` is too large", USAGE),
        ("normal", 0, {"initializer_range": None}, "initializer_range is None", FAILED),
        ("normal", 0, {"initializer_range": "0.02"}, "initializer_range is '0.02'", FAILED),
        ("normal", 0, {"initializer_range": -1}, "initializer_range is -1", FAILED),
        ("normal", 0, {"initializer_range": float("nan")}, "initializer_range is nan", FAILED),
    ],
)
def test_make_fill_rejects_invalid_values(
    init: str, seed: int, config: dict[str, Any], text: str, code: int
):
    with pytest.raises(PrepError) as caught:
        make_fill(init, seed, make_source(**config))
    assert text in caught.value.message
    assert caught.value.code == code


def test_scalar_and_empty_tensors_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    odd = {
        "transformer.h.0.attn.attention.bias": np.zeros((0, 5), np.uint8),
        "transformer.h.1.attn.attention.bias": np.zeros((1, 0), bool),
        "transformer.h.2.attn.attention.masked_bias": np.array(-1e9, np.float32),
        "transformer.h.0.attn.attention.masked_bias": np.zeros((0,), np.float32),
    }
    tensors = checkpoint_tensors(GPT_NEO, "float32", tied=True, legacy=False)
    write_checkpoint(Path("m"), GPT_NEO, {**odd, **tensors})
    assert main(["pad-vocab", "./m", "-q"]) == 0
    actual = read_tensors(Path("m-padded"))
    assert actual.keys() == {*odd, *tensors}
    assert all(same_bits(actual[name], odd[name]) for name in odd)
    assert main(["verify", "m-padded", "-q"]) == 0
    assert main(["save-init", "m-padded", "-q"]) == 0
    assert main(["export", "m-padded-init", "--out", "back", "-q"]) == 0
    assert all(
        same_bits(value, tensors[name]) for name, value in read_tensors(Path("back")).items()
    )


@pytest.mark.parametrize(("heads", "rules"), [(6, " --rule 'heads=mp|none'"), (8, "")])
def test_next_command_of_pad_vocab_works(
    heads: int,
    rules: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make_checkpoint(tmp_path / "m", GPT_NEO, hidden_size=48, num_heads=heads)
    command = run_json(capsys, "pad-vocab", "./m", "--mesh", "1,1,4")["next"]
    assert command == f"prep save-init m-padded --mesh 1,1,4{rules}"
    run_ok(*shlex.split(command)[1:])


@pytest.mark.parametrize(
    "words",
    [
        ["pad-vocab", "tiny", "--size", str(1 << 31)],
        ["pad-vocab", "tiny", "--multiple", str(1 << 62)],
        ["save-init", "tiny", "--pad-vocab", "9" * 18],
        ["save-init", "tiny", "--pad-vocab", "9" * 30],
        ["save-init", "tiny", "--pad-vocab", "9" * 5000],
    ],
)
def test_huge_vocabulary_is_refused_at_once(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It would have a plan of trillions of chunks."""
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("tiny"))
    err = run_failing(capsys, 2, *words, "--dry-run")
    assert "is too large" in err or "invalid `--pad-vocab 999" in err
    assert len(err) < 400
