"""Names of checkpoints: references that each spelling gives, paths, aliases, hub ids and revisions."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.core.errors import USAGE, PrepError, UsageError
from prepcli.formats.manifest import MANIFEST_FILE, encode_manifest
from prepcli.models.registry import FAMILIES as SUPPORTED_FAMILIES
from prepcli.sources.aliases import ALIAS_FAMILIES, ALIASES, ALIASES_BY_NAME
from prepcli.sources.locate import LocatedCheckpoint, locate
from prepcli.sources.open_folder import Access, OpenFolder
from prepcli.sources.references import (
    BucketUrl,
    HubRepo,
    LocalPath,
    Reference,
    RunStep,
    default_checkpoint,
    parse_reference,
)
from prepcli.stores.addresses import ObjectStoreUrl
from prepcli.stores.paths import local_copy
from tests.prepcli.sources.test_detect import fill


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def downloads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> list[tuple[str, str | None, bool]]:
    """Replace downloads by a folder named like a commit, and return the list of (hub id, revision, offline)."""
    requests = []

    def open_hub_folder(repo: HubRepo, access: Access) -> OpenFolder:
        requests.append((repo.display_name, repo.revision, access.offline))
        return OpenFolder(
            repo.display_name, fill(tmp_path / "abc123", "model.safetensors"), commit="abc123"
        )

    monkeypatch.setattr("prepcli.sources.remote_folders.open_hub_folder", open_hub_folder)
    return requests


def error_fields(error: PrepError) -> tuple[str, str, str, int]:
    return error.what, error.why, error.hint, error.code


def locate_error(name: str, revision: str | None = None) -> tuple[str, str, str, int]:
    with pytest.raises(PrepError) as caught:
        locate(name, revision)
    return error_fields(caught.value)


def test_locate_accepts_any_spelling_of_a_path(cwd: Path) -> None:
    fill(cwd / "llama-13b", "model.safetensors")
    for spelling in (
        "llama-13b",
        "./llama-13b",
        "llama-13b/",
        str(cwd / "llama-13b"),
        "../" + cwd.name + "/llama-13b",
    ):
        located = locate(spelling)
        assert (located.display_name, located.model_name, located.kind) == (
            spelling,
            "llama-13b",
            "safetensors",
        )
        assert located.files.commit is None
        assert local_copy(located.files.path).samefile(cwd / "llama-13b")


def test_locate_names_the_working_directory(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(fill(cwd / "llama-13b", "_METADATA"))
    assert (locate(".").model_name, locate(".").kind) == ("llama-13b", "orbax")


def test_locate_expands_home(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(cwd))
    fill(cwd / "m", "model.safetensors")
    assert locate("~/m").files.path == cwd / "m"


def test_locate_resolves_paths_from_cwd(tmp_path: Path) -> None:
    fill(tmp_path / "m", "model.safetensors")
    assert locate("m", cwd=tmp_path).files.path == tmp_path / "m"


def test_model_name_comes_from_the_manifest(cwd: Path) -> None:
    folder = fill(cwd / "renamed", "_METADATA")
    needed = {
        "kind": "hf",
        "request": "",
        "plan": "",
        "config": {},
        "tensors": {},
        "prefixed": True,
        "tied": True,
    }
    for content, name in [
        ({"name": "llama-13b"}, "llama-13b"),
        ({}, "renamed"),
        *(({"name": name}, "renamed") for name in ("../x", "..", "a\0b", "a\nb", "m" * 300, 3)),
    ]:
        (folder / MANIFEST_FILE).write_bytes(encode_manifest({**needed, **content}))
        assert locate("renamed").model_name == name


def test_broken_manifest_is_an_error(cwd: Path) -> None:
    (fill(cwd / "m", "_METADATA") / MANIFEST_FILE).write_text("{")
    assert locate_error("m")[0] == f"m/{MANIFEST_FILE} is broken"


def test_path_takes_precedence_over_alias_and_hub_id(cwd: Path, downloads: list[object]) -> None:
    fill(cwd / "llama-13b", "model.safetensors")
    fill(cwd / "owner", "name/model.safetensors")
    assert locate("llama-13b").files.commit is None
    assert locate("owner/name").files.commit is None
    assert downloads == []


def test_alias_resolves_to_its_hub_id(cwd: Path, downloads: list[object]) -> None:
    located = locate("llama-3-8b")
    local_files = OpenFolder("meta-llama/Meta-Llama-3-8B", cwd / "abc123", commit="abc123")
    assert located == LocatedCheckpoint(
        "meta-llama/Meta-Llama-3-8B",
        "llama-3-8b",
        "safetensors",
        local_files,
        None,
        may_be_quantized=False,
    )
    assert downloads == [("meta-llama/Meta-Llama-3-8B", None, False)]


def test_model_name_is_the_last_part_of_a_hub_id(cwd: Path, downloads: list[object]) -> None:
    assert locate("huggyllama/llama-13b", access=Access(offline=True)).model_name == "llama-13b"
    assert downloads == [("huggyllama/llama-13b", None, True)]


@pytest.mark.parametrize(
    ("name", "revision"),
    [
        ("llama-13b@v1", None),
        ("llama-13b", "v1"),
        ("llama-13b@v1", "v1"),
        ("huggyllama/llama-13b@v1", None),
    ],
)
def test_revision_comes_from_the_name_or_the_option(
    cwd: Path, downloads: list[object], name: str, revision: str | None
) -> None:
    assert locate(name, revision).model_name == "llama-13b"
    assert downloads == [("huggyllama/llama-13b", "v1", False)]


def test_revision_may_contain_slashes(cwd: Path, downloads: list[object]) -> None:
    locate("llama-13b@refs/pr/1")
    assert downloads == [("huggyllama/llama-13b", "refs/pr/1", False)]


def test_conflicting_revisions_are_an_error(cwd: Path) -> None:
    assert locate_error("llama-13b@v1", revision="v2") == (
        "invalid revision in `llama-13b@v1`", "`@v1` and `--revision v2`", "`llama-13b@v2`", USAGE,
    )  # fmt: skip
    assert locate_error("llama-13b@") == (
        "invalid revision in `llama-13b@`", "nothing follows the @", "`llama-13b@main`", USAGE,
    )  # fmt: skip


def test_locate_rejects_a_revision_of_a_folder(cwd: Path) -> None:
    fill(cwd / "m@v1", "model.safetensors")
    assert locate("m@v1").model_name == "m@v1"
    assert locate_error("m@v1", revision="v2")[0] == "`m@v1` has no revision v2"


def test_unknown_name_suggests_an_alias(cwd: Path) -> None:
    assert locate_error("gpt-neo-1.3b") == (
        "no checkpoint called `gpt-neo-1.3b`",
        "not a folder here, not an alias, and a hub id has the form owner/name",
        "did you mean `gpt-neo-1.3B`?",
        USAGE,
    )


def test_unknown_name_suggests_a_folder(cwd: Path) -> None:
    fill(cwd / "my-own-model-init", "_METADATA")
    assert locate_error("my-own-model-int")[2] == "did you mean `my-own-model-init`?"


def test_unknown_name_hints_at_the_list_of_models(cwd: Path) -> None:
    assert locate_error("zzz")[2] == "`prep models` lists the aliases"


@pytest.mark.parametrize(
    "name", ["", "a b/c", "-x/y", "owner/", "öwner/name", "~nobody/x", "a\0b", "x" * 9999]
)
def test_invalid_hub_id_makes_no_request(cwd: Path, downloads: list[object], name: str) -> None:
    assert locate_error(name)[3] == USAGE
    assert downloads == []


def test_missing_path_lists_folders(cwd: Path) -> None:
    for name in ("llama-13b", "llama-13b-init", ".hidden", "llama-13b-init.partial"):
        fill(cwd / name)
    fill(cwd, "file.txt")
    assert locate_error("./mistral") == (
        "`./mistral` does not exist",
        "it looks like a path because it begins with `./`",
        "folders here: llama-13b, llama-13b-init",
        USAGE,
    )


def test_missing_path_lists_folders_of_its_parent(cwd: Path) -> None:
    fill(cwd / "checkpoints", "a/x", "b/x")
    missing = cwd / "checkpoints" / "c"
    assert locate_error(str(missing)) == (
        f"`{missing}` does not exist",
        "it looks like a path because it begins with `/`",
        f"folders in {cwd / 'checkpoints'}: a, b",
        USAGE,
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../x", "begins with `../`"),
        ("~/x", "begins with `~`"),
        ("runs/a/100", "has more than one `/`"),
        ("x/", "ends with `/`"),
    ],
)
def test_missing_path_error_says_why_it_is_a_path(cwd: Path, name: str, reason: str) -> None:
    assert locate_error(name)[1] == f"it looks like a path because it {reason}"


def test_missing_path_error_limits_the_folders(cwd: Path) -> None:
    for number in range(12):
        fill(cwd / f"m{number:02d}")
    assert locate_error("./x")[2] == "folders here: m00, m01, m02, m03, m04, m05, m06, m07 …"


def test_default_checkpoint_is_the_only_prep_folder(cwd: Path) -> None:
    fill(cwd / "llama-13b", "model.safetensors")
    fill(cwd / "llama-13b-init", "_METADATA", MANIFEST_FILE)
    fill(cwd / "x-init.partial", MANIFEST_FILE)
    assert default_checkpoint(cwd) == cwd / "llama-13b-init"


def test_default_checkpoint_fails_without_a_prep_folder(cwd: Path) -> None:
    fill(cwd / "llama-13b", "model.safetensors")
    with pytest.raises(PrepError) as caught:
        default_checkpoint(cwd)
    assert error_fields(caught.value) == (
        "no checkpoint given", f"no suitable folder in the current folder has a {MANIFEST_FILE}",
        "name a folder, alias or hub id", USAGE,
    )  # fmt: skip


def test_default_checkpoint_lists_several_candidates(cwd: Path) -> None:
    for name in ("b-init", "a-1x64x4"):
        fill(cwd / name, "_METADATA", MANIFEST_FILE)
    with pytest.raises(PrepError) as caught:
        default_checkpoint(cwd)
    assert error_fields(caught.value) == (
        "no checkpoint given", f"2 folders in the current folder have a {MANIFEST_FILE}",
        "name one of: ./a-1x64x4, ./b-init", USAGE,
    )  # fmt: skip
    assert default_checkpoint(cwd, lambda folder: folder.name.endswith("-init")) == cwd / "b-init"


def test_default_checkpoint_accepts_a_run(cwd: Path) -> None:
    needed = {
        "kind": "hf",
        "request": "",
        "plan": "",
        "config": {},
        "tensors": {},
        "prefixed": True,
        "tied": True,
    }
    for step in ("9", "10"):
        (cwd / "first" / step).mkdir(parents=True)
        fill(cwd / "first" / step / "state", "_METADATA")
        name = {"name": f"tuned-{step}"}
        (cwd / "first" / step / MANIFEST_FILE).write_bytes(encode_manifest({**needed, **name}))
    (cwd / "second/5").mkdir(parents=True)
    fill(cwd / "second/5/state", "_METADATA")
    assert default_checkpoint(cwd) == cwd / "first"
    assert [locate(f"./first{end}", cwd=cwd).model_name for end in ("", "/9", "/10/state")] == [
        "tuned-10",
        "tuned-9",
        "tuned-10",
    ]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
    folders: Path, name: str, reference: Reference
) -> None:
    assert parse_reference(name) == reference


@pytest.mark.parametrize(
    ("name", "model_name"), [("m", "m"), ("gs://bucket/x/y/", "y"), ("s3://bucket", "bucket")]
)
def test_reference_names_its_model(folders: Path, name: str, model_name: str) -> None:
    assert parse_reference(name).model_name == model_name


def test_parse_reference_finds_a_step_of_a_run(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folders))
    for run in ("runs/a", "~/runs/a"):
        step = parse_reference(run, step=9)
        assert isinstance(step, RunStep)
        assert (step.display_name, step.path.resolve()) == (f"{run}/9", folders / "runs/a/9")


def test_parse_reference_rejects_an_unknown_step(folders: Path) -> None:
    assert usage_what("runs/a", step=8) == "runs/a has no step 8"
    assert usage_what("owner/name", step=8) == "owner/name has no step 8"


def test_only_hub_names_have_a_revision(folders: Path) -> None:
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
    folders: Path, monkeypatch: pytest.MonkeyPatch, address: str, reference: HubRepo
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
    folders: Path, address: str, why: str, hint: str
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
def test_page_of_the_hub_without_a_repository_is_named(folders: Path, page: str) -> None:
    address = f"https://huggingface.co/{page}"
    with pytest.raises(UsageError) as caught:
        parse_reference(address)
    assert caught.value.what == f"`{address}` is not a model"
    assert caught.value.why == "it is a page on the hub"
    assert caught.value.hint == "name a model"


def test_mistyped_run_is_not_looked_up_on_the_hub(folders: Path) -> None:
    with pytest.raises(UsageError) as caught:
        parse_reference("runs/b")
    assert caught.value.what == "`runs/b` does not exist"
    assert parse_reference("hf://runs/b") == HubRepo("runs/b", "b")
    # A folder of models that were downloaded has the name of their owner.
    fill(folders / "owner", "other/model.safetensors")
    assert parse_reference("owner/name") == HubRepo("owner/name", "name")


def test_alias_names_are_unique_and_no_paths() -> None:
    assert len(ALIASES_BY_NAME) == len(ALIASES)
    assert not any(set("/@~ ") & set(alias.name) for alias in ALIASES)
    assert all(alias.hub_id.count("/") == 1 for alias in ALIASES)


def test_alias_families_are_supported() -> None:
    assert {*ALIAS_FAMILIES} <= {*SUPPORTED_FAMILIES}
