"""The identity of a token store: unchanged for the recipes of earlier versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.corpus import change
from trainer.data.fields import ExampleSettings
from trainer.data.files import DataFile
from trainer.data.tokenize import TokenizeConfig, store_identity

FILES = [DataFile(Path("a"), 10, "d1"), DataFile(Path("b"), 20, "d2")]


def identity(**changes: Any) -> str:
    """Return the identity of a store of FILES."""
    config = TokenizeConfig(
        type="text",
        paths=("a",),
        examples=ExampleSettings(eos_id=0),
        seq_length=8,
        tokenizer=Path("t"),
        vocab=300,
        cache=Path("c"),
    )
    return store_identity(change(config, **changes), FILES, "tokenizer")


@pytest.mark.parametrize(
    ("changes", "recorded"),
    [
        ({}, "bd1a2e9022d6c54251ccec723e18282d"),
        ({"eos_id": None}, "e84760fb2b0248eba564c25e6d0810ad"),
        ({"type": "json", "fields": "text"}, "bea09ba10bfd281250553682122eaf0b"),
        ({"type": "json", "fields": "my text"}, "417eea8b52d4274a93a0ca48d67f57d2"),
        ({"type": "json", "fields": "[a], [b], c", "has_encoder": True}, "f42182989a392ce0099c15c2d783bc13"),
        (
            {"type": "json", "fields": "[a], c", "has_encoder": True, "source_prefix": "do: "},
            "7c3c283b6c803123420db07927ad73a9",
        ),
    ],
)
def test_identity_of_earlier_versions_is_unchanged(changes: dict[str, Any], recorded: str):
    assert identity(**changes) == recorded
