"""Tests of `open_source`: a config of the user, and the manifest of an output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import prepcli as prep
from prepcli.core.errors import PrepError
from prepcli.formats import manifest
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from tests.helpers.tiny_checkpoints import make_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "m")
    return tmp_path / "m"


def test_open_source_uses_the_config_of_the_user(model: Path, tmp_path: Path):
    expected = open_source(locate(str(model)))
    config = (model / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(PrepError, match=r"has no config\.json"):
        open_source(locate(str(model)))
    for config_path in (config, tmp_path):
        source = open_source(locate(str(model)), config_path)
        assert (source.config, source.tensors) == (expected.config, expected.tensors)


def test_config_of_the_user_overrides_the_folder(model: Path, tmp_path: Path):
    text = (model / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"model_type"', '"extra": 1, "model_type"'))
    assert open_source(locate(str(model)), tmp_path).config["extra"] == 1


def test_missing_config_of_the_user_is_named(model: Path, tmp_path: Path):
    path = tmp_path / "typo"
    with pytest.raises(PrepError, match=f'^`config="{path}"` does not exist - .* config.json'):
        open_source(locate(str(model)), path)


@pytest.mark.parametrize("operation", [prep.save_init, prep.pad_vocab])
def test_manifest_of_an_output_is_read_once(
    operation: Callable[..., prep.Conversion],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    output = operation(model, tmp_path / "output").path
    read: list[Path] = []
    parse_manifest = manifest.parse_manifest

    def count_reads(path: Path, data: bytes) -> manifest.Manifest:
        read.append(path)
        return parse_manifest(path, data)

    monkeypatch.setattr(manifest, "parse_manifest", count_reads)
    source = open_source(locate(str(output)))
    assert source.manifest is not None
    assert read == [output / "prep-manifest.json"]
