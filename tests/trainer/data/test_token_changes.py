"""A resumed run with other tokens is refused before they are made, and the error names the cause."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import PrepError
from tests.helpers.corpus import change, make_config, write_json
from tests.helpers.earlier_tokens import BOS, chat_config, make_earlier_tokens, recorded_identity
from trainer.data.examples import IdentityChange
from trainer.data.tokenize import tokenize_files, tokenize_share
from trainer.data.tokenize_config import RecordedTokens, TokenizeConfig

VERSION_HINT = "the earlier version finishes the run; `--restart` starts again from step 0"


@pytest.fixture
def config(tmp_path: Path) -> TokenizeConfig:
    """Return settings of text documents."""
    file = write_json(tmp_path / "a.jsonl", ["the cat sat"] * 9)
    return make_config(tmp_path, file, type="json", bos_id=BOS)


def refusal(config: TokenizeConfig, recorded: str, add_bos: bool | None) -> PrepError:
    """Return the error of a run that began with other tokens. No token is made."""
    resumed = replace(config, recorded=RecordedTokens((recorded, "another store"), add_bos))

    def fail(*_: Any) -> None:
        pytest.fail("tokens were made")

    with pytest.raises(PrepError) as caught:
        tokenize_files(resumed, progress=fail, note=lambda line: None)
    with pytest.raises(PrepError) as shared:
        tokenize_share(resumed, 0, 2, progress=fail, note=lambda line: None)
    assert str(shared.value) == str(caught.value)
    # Only digests of the files are recorded.
    assert not [path for path in config.cache.iterdir() if path.is_dir()]
    assert caught.value.what == "the data has changed since the run began"
    return caught.value


def missing_tokens(config: TokenizeConfig, identity: str, *changes: IdentityChange) -> str:
    """Return the cause of an error of tokens that this version does not make."""
    causes = [
        *(change.value for change in changes),
        f"{config.cache / identity} is missing or damaged",
    ]
    return ", and ".join(causes)


def test_tokens_of_other_files_are_refused_before_they_are_made(config: TokenizeConfig):
    error = refusal(config, "recorded", add_bos=None)
    assert error.why.startswith("recorded another store, now ")
    assert error.hint.startswith(
        "use the files with which the run began, on all hosts; `--restart`"
    )


def test_recorded_tokens_are_made_again(config: TokenizeConfig):
    recorded = RecordedTokens((recorded_identity(config),), None)
    resumed = replace(config, recorded=recorded)
    tokens = tokenize_files(resumed, progress=lambda *_: None, note=lambda line: None)
    assert tokens.identity == recorded.identities[0]


@pytest.mark.parametrize("then", [True, pytest.param(None, marks=pytest.mark.slow)])
def test_changed_begin_token_is_named(config: TokenizeConfig, then: bool | None):
    begun = recorded_identity(change(config, add_bos=then))
    error = refusal(change(config, add_bos=not then), begun, add_bos=then)
    value = "true" if then else ""
    assert error.why.startswith("data.add_bos: ")
    assert error.hint.startswith(f"`--set data.add_bos={value}` keeps it; `--restart`")


def test_begin_token_is_not_the_cause_for_chats_without_it(tmp_path: Path):
    # An earlier version recorded `data.add_bos = false`, the default then.
    pytest.importorskip("jinja2")
    error = refusal(chat_config(tmp_path), "recorded", add_bos=False)
    assert "data.add_bos" not in f"{error.why} {error.hint}"


def test_second_begin_token_of_an_earlier_version_is_named(tmp_path: Path):
    config = change(chat_config(tmp_path), add_bos=True)
    begun = recorded_identity(config, IdentityChange.SINGLE_BOS)
    error = refusal(config, begun, add_bos=True)
    assert error.why == missing_tokens(config, begun, IdentityChange.SINGLE_BOS)
    assert error.hint.startswith(VERSION_HINT)


def test_rows_of_tables_of_an_earlier_version_are_named(tmp_path: Path):
    config = chat_config(tmp_path, ".parquet")
    begun = recorded_identity(config, IdentityChange.TABLE_ROWS)
    error = refusal(config, begun, add_bos=False)
    assert error.why == missing_tokens(config, begun, IdentityChange.TABLE_ROWS)
    assert error.hint.startswith(VERSION_HINT)
    # The first version had none of the changes.
    others = (IdentityChange.CONTENT_PARTS, IdentityChange.JSON_LISTS)
    first = [cause for cause in IdentityChange if cause not in others]
    both = recorded_identity(change(config, add_bos=True), *first)
    error = refusal(config, both, add_bos=True)
    causes = missing_tokens(config, both, *first)
    assert error.why == f"data.add_bos: true -> not set, and {causes}"


@pytest.mark.parametrize("change", [IdentityChange.CONTENT_PARTS, IdentityChange.CHAT_RENDERING])
def test_resumed_run_keeps_the_tokens_of_an_earlier_version(tmp_path: Path, change: IdentityChange):
    config = chat_config(tmp_path)
    begun, present = make_earlier_tokens(config, change)
    stores = sorted(path.name for path in config.cache.iterdir() if path.is_dir())
    resumed = replace(config, recorded=RecordedTokens((begun,), None))
    notes: list[str] = []
    tokens = tokenize_files(resumed, progress=lambda *_: None, note=notes.append)
    assert tokens.identity == begun
    assert f"the run keeps the tokens of the earlier version: {change.value}" in notes
    share = tokenize_share(resumed, 0, 2, progress=lambda *_: None, note=lambda line: None)
    assert share.folder == config.cache / begun
    assert sorted(path.name for path in config.cache.iterdir() if path.is_dir()) == stores
    # A new run has the new tokens, also if it trusts the times of the files.
    trusting = replace(config, checks_digests=False)
    again = tokenize_files(trusting, progress=lambda *_: None, note=lambda line: None)
    assert again.identity == present


def test_damaged_tokens_of_an_earlier_version_are_not_made_again(tmp_path: Path):
    config = chat_config(tmp_path)
    begun, _ = make_earlier_tokens(config, IdentityChange.CHAT_RENDERING)
    ids = config.cache / begun / "tokens.bin"
    ids.write_bytes(bytes(ids.stat().st_size))
    resumed = replace(config, recorded=RecordedTokens((begun,), None))
    with pytest.raises(PrepError) as caught:
        tokenize_files(resumed, progress=lambda *_: None, note=lambda line: None)
    assert caught.value.why == missing_tokens(config, begun, IdentityChange.CHAT_RENDERING)
    assert caught.value.hint.startswith(VERSION_HINT)
