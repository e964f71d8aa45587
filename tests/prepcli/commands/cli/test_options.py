"""Shell completion and defaults of the shared options."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.commands.cli.option_groups import (
    complete_checkpoint,
    complete_devices,
    complete_family,
    complete_recipe,
    complete_recipe_or_checkpoint,
    complete_shipped_recipe,
)
from prepcli.commands.operations.options import DEFAULT_MEMORY
from prepcli.core.formatting import parse_bytes, suggest
from prepcli.formats.manifest import MANIFEST_FILE
from tests.prepcli.sources.test_detect import fill


def test_complete_checkpoint_lists_folders_and_aliases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "llama-mine-init", MANIFEST_FILE)
    fill(tmp_path / "llama-other", "model.safetensors")
    assert complete_checkpoint("llama-")[:3] == ["llama-mine-init", "llama-7b", "llama-13b"]
    assert complete_checkpoint("llama-o") == []


def test_complete_family_lists_families() -> None:
    assert complete_family("gpt") == ["gpt2", "gpt_neo", "gptj", "gpt_neox"]


def test_complete_recipe_lists_files_and_shipped_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt-mine.toml").touch()
    assert complete_recipe("gpt-")[:2] == ["gpt-mine.toml", "gpt-j-6b"]
    assert complete_recipe_or_checkpoint("gpt2")[:3] == ["gpt2", "gpt2-medium", "gpt2-large"]
    assert complete_shipped_recipe("gpt2") == ["gpt2"]


def test_complete_devices_lists_kinds_in_any_case() -> None:
    assert complete_devices("a100") == ["A100-40", "A100-80"]


def test_suggest_returns_one_name_or_none() -> None:
    assert suggest("pad-vcab", ["pad-vocab", "pad-vocabs", "models"]) == "pad-vocab"
    assert suggest("zzz", ["pad-vocab"]) is None


def test_default_memory_is_a_size() -> None:
    assert parse_bytes(DEFAULT_MEMORY, "memory") == 512 << 20
