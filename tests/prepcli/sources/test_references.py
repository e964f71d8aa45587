"""Tests of `parse_reference`: the type of reference that each spelling of a checkpoint's name gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.core.errors import USAGE, PrepError, UsageError
from prepcli.formats.manifest import MANIFEST_FILE
from prepcli.sources.references import (
    BucketUrl,
    HubRepo,
    LocalPath,
    Reference,
    RunStep,
    parse_reference,
)
from prepcli.stores.addresses import ObjectStoreUrl
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


@pytest.mark.parametrize(
    ("address", "reference"),
    [
        ("https://huggingface.co/owner/name", HubRepo("owner/name", "name")),
        ("https://huggingface.co/owner/name/", HubRepo("owner/name", "name")),
        ("https://hf.co/owner/name/tree/v1", HubRepo("owner/name", "name", "v1")),
        ("https://huggingface.co/owner/n/tree/refs%2Fpr%2F1", HubRepo("owner/n", "n", "refs/pr/1")),
        ("https://mirror.test/owner/name", HubRepo("owner/name", "name")),
        ("https://huggingface.co/gpt2", HubRepo("openai-community/gpt2", "gpt2")),
        ("https://huggingface.co/owner/n/tree/refs/pr/1", HubRepo("owner/n", "n", "refs/pr/1")),
        ("hf://owner/name@v1", HubRepo("owner/name", "name", "v1")),
        ("hf://owner/name@refs/pr/3", HubRepo("owner/name", "name", "refs/pr/3")),
        ("hf://owner/name@refs%2Fpr%2F3", HubRepo("owner/name", "name", "refs/pr/3")),
        (
            "hf://owner/name@refs/pr/3/m.gguf",
            HubRepo("owner/name", "m", "refs/pr/3", "m.gguf"),
        ),
        (
            "https://huggingface.co/owner/name/blob/main/m.Q8_0.gguf",
            HubRepo("owner/name", "m.Q8_0", "main", "m.Q8_0.gguf"),
        ),
    ],
)
def test_address_on_the_hub_names_its_model(
    cwd: Path, monkeypatch: pytest.MonkeyPatch, address: str, reference: HubRepo
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.test")
    assert parse_reference(address) == reference


@pytest.mark.parametrize(
    ("address", "why", "hint"),
    [
        (
            "https://huggingface.co/owner",
            "a hub id has the form owner/name",
            "`prep models` lists the aliases",
        ),
        (
            "https://huggingface.co/datasets/owner/name/viewer/default/train",
            "it is a dataset on the hub",
            '`data.path = "hf://datasets/owner/name"` in a recipe reads it',
        ),
        ("hf://spaces/owner/name", "it is a space on the hub", "name a model"),
        (
            "https://huggingface.co/owner/name/blob/main/config.json",
            "`config.json` is part of a model, and a model is read as a whole",
            "`owner/name`",
        ),
        ("hf://owner/name@v1", "`@v1` and `--revision v2`", "`owner/name@v2`"),
    ],
)
def test_address_of_another_page_leads_to_the_model(
    cwd: Path, address: str, why: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        parse_reference(address, "v2" if "@v1" in address else None)
    assert why in str(caught.value.why)
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    "page",
    [
        *("", "docs", "docs/transformers/index", "papers/2302.13971", "collections/owner/name-1a"),
        *("spaces", "models", "blog/name", "owner/name/unknown/page", "models?search=name"),
    ],
)
def test_page_of_the_hub_without_a_repository_is_named(cwd: Path, page: str) -> None:
    address = f"https://huggingface.co/{page}"
    with pytest.raises(UsageError) as caught:
        parse_reference(address)
    assert caught.value.what == f"`{address}` is not a model"
    assert caught.value.why == "it is a page on the hub"
    assert caught.value.hint == "name a model"


def test_mistyped_run_is_not_looked_up_on_the_hub(cwd: Path) -> None:
    with pytest.raises(UsageError) as caught:
        parse_reference("runs/b")
    assert caught.value.what == "`runs/b` does not exist"
    assert parse_reference("hf://runs/b") == HubRepo("runs/b", "b")
    # A folder of models that were downloaded has the name of their owner.
    fill(cwd / "owner", "other/model.safetensors")
    assert parse_reference("owner/name") == HubRepo("owner/name", "name")
