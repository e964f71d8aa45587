"""The identity of a token store: unchanged for the recipes of earlier versions."""

from __future__ import annotations

import datetime
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.corpus import change
from trainer.data.chat_template import ChatTemplate
from trainer.data.conversations import LossRule
from trainer.data.examples import ExampleSettings, IdentityChange
from trainer.data.files import DataFile
from trainer.data.tokenize_config import TokenizeConfig, store_identity

FILES = [DataFile(Path("a"), 10, "d1"), DataFile(Path("b"), 20, "d2")]


def identity(without: Collection[IdentityChange] = (), **changes: Any) -> str:
    """Return the identity of a store of FILES, without changes since an earlier version."""
    config = TokenizeConfig(
        type="text",
        paths=("a",),
        examples=ExampleSettings(eos_id=0),
        seq_length=8,
        tokenizer=Path("t"),
        vocab=300,
        cache=Path("c"),
    )
    return store_identity(change(config, **changes), FILES, "tokenizer", without=without)


@pytest.mark.parametrize(
    ("changes", "recorded"),
    [
        ({}, "bd1a2e9022d6c54251ccec723e18282d"),
        ({"eos_id": None}, "e84760fb2b0248eba564c25e6d0810ad"),
        ({"type": "json", "fields": "text"}, "bea09ba10bfd281250553682122eaf0b"),
        ({"type": "json", "fields": "my text"}, "417eea8b52d4274a93a0ca48d67f57d2"),
        (
            {"type": "json", "fields": "[a], [b], c", "has_encoder": True},
            "f42182989a392ce0099c15c2d783bc13",
        ),
        (
            {"type": "json", "fields": "[a], c", "has_encoder": True, "source_prefix": "do: "},
            "7c3c283b6c803123420db07927ad73a9",
        ),
    ],
)
def test_identity_of_earlier_versions_is_unchanged(changes: dict[str, Any], recorded: str):
    assert identity(**changes) == recorded


JSON = {"type": "json", "fields": "text", "bos_id": 3}
TEMPLATE = ChatTemplate("f", "{{ messages }}", (("bos_token", "<s>"),))
VARIANTS: list[dict[str, Any]] = [
    JSON,
    {**JSON, "add_bos": True},
    {**JSON, "add_bos": True, "bos_id": 4},
    {**JSON, "add_eos": False},
    {**JSON, "prepend_text": "Q: "},
    {**JSON, "subfield_separator": ""},
    {**JSON, "max_examples": 5},
    {**JSON, "fields": "[text], b"},
    {**JSON, "fields": "[text], b", "has_encoder": True},
    {**JSON, "fields": "[text+b], b"},
    {**JSON, "fields": "[text+b], b", "has_encoder": True},
    {**JSON, "fields": "[text+b], b", "has_encoder": True, "bos_id": 4},
    {**JSON, "fields": "<|bos|>, b"},
    {**JSON, "fields": "<|bos|>, b", "bos_id": 4},
    {**JSON, "fields": "<|bos|>, b", "add_eos": False},
    {**JSON, "fields": "<|bos|>, b", "add_eos": False, "eos_id": 1},
    {**JSON, "fields": "{text}"},
    {**JSON, "fields": "", "fields_from_example": "text"},
    {**JSON, "fields": "", "fields_from_example": "text", "bos_id": 4},
    {**JSON, "fields": "", "fields_from_example": "text", "has_encoder": True},
    {**JSON, "chat_template": TEMPLATE},
    {**JSON, "chat_template": replace(TEMPLATE, text="{{ messages[0] }}")},
    {**JSON, "chat_template": replace(TEMPLATE, special_tokens=())},
    {**JSON, "chat_template": replace(TEMPLATE, tool_text="{{ tools }}")},
    {**JSON, "chat_template": replace(TEMPLATE, arguments='{"a": 1}')},
    {**JSON, "chat_template": replace(TEMPLATE, date=datetime.date(2026, 1, 31))},
    {**JSON, "chat_template": TEMPLATE, "joins_last_turns": True},
    {**JSON, "chat_template": TEMPLATE, "loss": LossRule(("last",))},
    {**JSON, "chat_template": TEMPLATE, "loss": LossRule(has_reasoning=False)},
    {**JSON, "chat_template": TEMPLATE, "stop_texts": ("</s>",)},
]


def test_identity_depends_on_all_settings_of_examples():
    assert len({identity(**variant) for variant in VARIANTS}) == len(VARIANTS)


@pytest.mark.parametrize(
    "change", [{"bos_id": 4}, {"source_length": 9}, {"eos_id": 0, "add_bos": False}]
)
def test_identity_ignores_settings_that_change_no_token(change: dict[str, Any]):
    assert identity(**JSON) == identity(**{**JSON, **change})


def test_chat_identity_has_the_begin_token_only_if_the_template_lacks_it():
    settings = {**JSON, "fields": "messages", "chat_template": TEMPLATE}
    assert identity(**settings, add_bos=True) != identity(**settings)
    writes_bos = replace(TEMPLATE, text="{{ bos_token }}{{ messages }}")
    doubled = {**settings, "chat_template": writes_bos}
    assert identity(**doubled, add_bos=True) != identity(**settings, add_bos=True)


def test_identity_ignores_the_file_of_a_chat_template():
    assert identity(**JSON, chat_template=TEMPLATE) == identity(
        **JSON, chat_template=replace(TEMPLATE, file="other")
    )


def test_identity_has_the_rule_of_lists_only_with_skipped_lines():
    earlier = [IdentityChange.JSON_LISTS]
    # Recorded before lists were read.
    assert identity(earlier, type="json", fields="text", bad_lines=2) == (
        "25fb75f318c9a5a17fd253d64c38eb4f"
    )
    assert identity(earlier, **JSON, bad_lines=2) != identity(**JSON, bad_lines=2)
    assert identity(earlier, **JSON) == identity(**JSON)
    csv = {**JSON, "type": "csv"}
    assert identity(earlier, **csv, bad_lines=2) == identity(**csv, bad_lines=2)


def test_identity_has_the_document_limit_only_with_skipped_lines():
    assert identity(**JSON, max_document_nbytes=5) == identity(**JSON)
    assert identity(**JSON, max_document_nbytes=5, bad_lines=2) != identity(**JSON, bad_lines=2)


@pytest.mark.parametrize(
    ("changes", "recorded"),
    [
        ({"type": "parquet"}, "eafee558c91dd2e364aa0d2e44d7ca9e"),
        ({"type": "parquet", "add_bos": True}, "a5e21b119fcaba5ecdbae54967950cd6"),
        ({"type": "json", "add_bos": True}, "f544d5cb77c1fd774c53de278ac8a160"),
    ],
)
def test_identity_without_changes_is_that_of_an_earlier_version(
    changes: dict[str, Any], recorded: str
):
    writes_bos = replace(TEMPLATE, text="{{ bos_token }}{{ messages }}")
    settings = {"bos_id": 3, "fields": "messages", "chat_template": writes_bos, **changes}
    assert identity(**settings) != recorded
    assert identity([*IdentityChange], **settings) == recorded
