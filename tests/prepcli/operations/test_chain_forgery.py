"""`prep verify --chain` proves no link with a part that was not compared, and no manifest avoids the lock."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import prepcli as prep
from tests.helpers.manifests import changed_manifest
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.training_folder import write_tokenizer

LOCK = "m.lock.json"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a model `m` with a tokenizer to the working folder."""
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("m"), LLAMA)
    write_tokenizer(Path("m"))
    return Path("m")


def set_source(folder: str, source: str) -> None:
    """Change the recorded source of an output, without its identity."""
    with changed_manifest(Path(folder)) as manifest:
        manifest["source"]["name"] = source
        manifest.pop("origin", None)


def only_link(output: str) -> prep.ChainLink:
    (link,) = prep.verify_chain(output).links
    return link


@pytest.mark.parametrize("source", ["out", "other"], ids=["itself", "each-other"])
def test_output_that_is_its_own_source_fails(model: Path, source: str):
    prep.lock(model)
    prep.pad_vocab(model, "out", multiple=8)
    shutil.copytree("out", "other")
    set_source("out", source)
    set_source("other", "out")
    broken = prep.verify_chain("out", lock=LOCK).broken_link
    assert broken is not None
    assert broken.status == "failed"
    assert "records itself as source" in broken.reason


def test_lock_without_a_compared_checkpoint_fails(model: Path):
    prep.lock(model)
    prep.pad_vocab(model, "out", multiple=8)
    model.rename("moved")
    broken = prep.verify_chain("out", lock=LOCK, allow_unproven=True).broken_link
    assert broken is not None
    assert broken.status == "failed"
    assert broken.reason == "the lock was compared with no checkpoint"
