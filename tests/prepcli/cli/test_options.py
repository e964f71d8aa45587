"""Completion: names that a user may want to type."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.cli.options import DEFAULT_MEMORY, complete_checkpoint, complete_family
from prepcli.console.formatting import parse_bytes
from prepcli.formats.manifest import MANIFEST_FILE
from tests.prepcli.formats.test_detect import fill
from trainer.models.suggest import suggest


def test_prep_folders_and_aliases_complete_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "llama-mine-init", MANIFEST_FILE)
    fill(tmp_path / "llama-other", "model.safetensors")
    assert complete_checkpoint("llama-")[:3] == ["llama-mine-init", "llama-7b", "llama-13b"]
    assert complete_checkpoint("llama-o") == []


def test_families_complete() -> None:
    assert complete_family("gpt") == ["gpt2", "gpt_neo", "gptj", "gpt_neox"]


def test_one_guess_or_none() -> None:
    assert suggest("pad-vcab", ["pad-vocab", "pad-vocabs", "models"]) == "pad-vocab"
    assert suggest("zzz", ["pad-vocab"]) is None


def test_the_default_memory_is_a_size() -> None:
    assert parse_bytes(DEFAULT_MEMORY) == 512 << 20
