"""Invalid lines: the first ones are reported with file and line, and one more than the limit is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.corpus import change, make_config
from trainer.data.store import MappedTokens
from trainer.data.tokenize import TokenizeConfig, tokenize_files
from trainer.models.errors import PrepError

GOOD = '{"text": "the cat sat on the mat"}'
LINES = [GOOD, "{", '{"body": "x"}', "", '{"text": 3}', GOOD, '{"text": "\\ud800"}', "[]", GOOD]
N_BAD = 5


@pytest.fixture
def config(tmp_path: Path) -> TokenizeConfig:
    (tmp_path / "a.jsonl").write_text("\n".join(LINES))
    return make_config(tmp_path, tmp_path / "a.jsonl", type="json", fields="text")


def tokenize(config: TokenizeConfig) -> tuple[MappedTokens, list[str]]:
    """Return the tokens and the notes."""
    notes: list[str] = []
    return tokenize_files(config, progress=lambda *counts: None, note=notes.append), notes


def test_bad_lines_up_to_the_limit_are_skipped_and_reported(config: TokenizeConfig, tmp_path: Path):
    tokens, notes = tokenize(change(config, bad_lines=N_BAD))
    (tmp_path / "good.jsonl").write_text(f"{GOOD}\n" * 3)
    expected, _ = tokenize(change(config, paths=(str(tmp_path / "good.jsonl"),)))
    assert tokens.ids.tolist() == expected.ids.tolist()
    path = tmp_path / "a.jsonl"
    assert [note.partition(" (")[0] for note in notes[:4]] == [
        f"skipped {path}:2: not JSON",
        f"skipped {path}:3: no column `text`",
        f"skipped {path}:5: column `text` is not text",
        f"{N_BAD} invalid lines skipped",
    ]


@pytest.mark.parametrize("limit", [0, 1, N_BAD - 1])
def test_one_bad_line_more_than_the_limit_is_an_error(
    config: TokenizeConfig, tmp_path: Path, limit: int
):
    with pytest.raises(PrepError) as caught:
        tokenize(change(config, bad_lines=limit))
    bad_numbers = [2, 3, 5, 7, 8]
    assert caught.value.what.startswith(f"{tmp_path}/a.jsonl:{bad_numbers[limit]}: ")
    assert caught.value.what.endswith(f"after {limit} invalid lines") == bool(limit)


def test_limit_is_part_of_the_identity(config: TokenizeConfig):
    tokens, _ = tokenize(change(config, bad_lines=N_BAD))
    again, notes = tokenize(change(config, bad_lines=N_BAD + 1))
    assert tokens.identity != again.identity
    assert not any("earlier run" in note for note in notes)
    with pytest.raises(PrepError):
        tokenize(config)


def test_invalid_utf8_in_a_line_can_be_skipped(config: TokenizeConfig, tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(GOOD.encode() + b'\n{"text": "\xff"}\n{"text": "x"}')
    _, notes = tokenize(change(config, bad_lines=1, seq_length=2))
    assert (
        notes[0]
        == f"skipped {tmp_path}/a.jsonl:2 is not UTF-8 (byte 45 is 0xff: invalid start byte)"
    )
