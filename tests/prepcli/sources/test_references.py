"""Tests of `parse_reference`: the type of reference that each spelling of a checkpoint's name gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.errors import USAGE, PrepError
from prepcli.formats.manifest import MANIFEST_FILE
from prepcli.remote.object_store import ObjectStoreUrl
from prepcli.sources.references import (
    BucketUrl,
    HubRepo,
    LocalPath,
    Reference,
    RunStep,
    parse_reference,
)
from tests.prepcli.sources.test_detect import fill


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with a checkpoint `m` and a run `runs/a` of one step."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "m", "model.safetensors")
    fill(tmp_path / "runs", f"a/9/{MANIFEST_FILE}", "a/9/state/_METADATA")
    return tmp_path


def usage_what(name: str, revision: str | None = None, step: int | None = None) -> str:
    with pytest.raises(PrepError) as caught:
        parse_reference(name, revision, step=step)
    assert caught.value.code == USAGE
    return caught.value.what


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("m", LocalPath("m", Path("m"))),
        ("params::m", LocalPath("params::m", Path("m"), "params")),
        ("llama-13b@v1", HubRepo("huggyllama/llama-13b", "llama-13b", "v1")),
        ("owner/name", HubRepo("owner/name", "name")),
        ("gs://bucket/x/y/", BucketUrl("gs://bucket/x/y/", ObjectStoreUrl("gs", "bucket", "x/y"))),
    ],
)
def test_parse_reference_gives_one_type_per_spelling(
    cwd: Path, name: str, reference: Reference
) -> None:
    assert parse_reference(name) == reference


@pytest.mark.parametrize(
    ("name", "model_name"), [("m", "m"), ("gs://bucket/x/y/", "y"), ("s3://bucket", "bucket")]
)
def test_reference_names_its_model(cwd: Path, name: str, model_name: str) -> None:
    assert parse_reference(name).model_name == model_name


def test_parse_reference_finds_a_step_of_a_run(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(cwd))
    for run in ("runs/a", "~/runs/a"):
        step = parse_reference(run, step=9)
        assert isinstance(step, RunStep)
        assert (step.display_name, step.path.resolve()) == (f"{run}/9", cwd / "runs/a/9")


def test_parse_reference_rejects_an_unknown_step(cwd: Path) -> None:
    assert usage_what("runs/a", step=8) == "runs/a has no step 8"
    assert usage_what("owner/name", step=8) == "owner/name has no step 8"


def test_only_hub_names_have_a_revision(cwd: Path) -> None:
    assert usage_what("m", "v1") == "`m` has no revision v1"
    assert usage_what("m/model.safetensors", "v1") == "`m/model.safetensors` has no revision v1"
    assert usage_what("runs/a", "v1", 9) == "`runs/a/9` has no revision v1"
    assert usage_what("gs://bucket/x", "v1") == "`gs://bucket/x` has no revision v1"
