"""From a name to a folder: path > alias > hub id."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.errors import USAGE, PrepError
from prepcli.formats.manifest import MANIFEST_FILE, encode_manifest
from prepcli.remote import hub
from prepcli.sources.locate import LocatedCheckpoint, default_checkpoint, locate
from tests.prepcli.formats.test_detect import fill


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str | None, bool]]:
    """What would have been downloaded, (hub id, revision, offline); each is a folder named by its commit."""
    asked = []

    def download(hub_id: str, revision: str | None, offline: bool, *_: object) -> Path:
        asked.append((hub_id, revision, offline))
        return fill(tmp_path / "abc123", "model.safetensors")

    monkeypatch.setattr(hub, "download", download)
    return asked


def message(error: PrepError) -> tuple[str, str, str, int]:
    return error.what, error.why, error.hint, error.code


def refusal(name: str, revision: str | None = None) -> tuple[str, str, str, int]:
    with pytest.raises(PrepError) as caught:
        locate(name, revision)
    return message(caught.value)


def test_a_folder_is_found_by_any_spelling_of_its_path(here: Path) -> None:
    fill(here / "llama-13b", "model.safetensors")
    for spelling in (
        "llama-13b",
        "./llama-13b",
        "llama-13b/",
        str(here / "llama-13b"),
        "../" + here.name + "/llama-13b",
    ):
        found = locate(spelling)
        assert (found.model_name, found.kind, found.hub_id, found.revision) == ("llama-13b", "safetensors", None, None)
        assert found.path.samefile(here / "llama-13b")


def test_the_working_directory_itself_has_its_own_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(fill(here / "llama-13b", "_METADATA"))
    assert (locate(".").model_name, locate(".").kind) == ("llama-13b", "orbax")


def test_home_is_expanded(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    fill(here / "m", "model.safetensors")
    assert locate("~/m").path == here / "m"


def test_relative_paths_count_from_the_folder_that_is_given(tmp_path: Path) -> None:
    fill(tmp_path / "m", "model.safetensors")
    assert locate("m", cwd=tmp_path).path == tmp_path / "m"


def test_the_manifest_knows_the_name_of_the_model(here: Path) -> None:
    folder = fill(here / "renamed", "_METADATA")
    needed = {"kind": "hf", "request": "", "plan": "", "config": {}, "tensors": {}, "prefixed": True, "tied": True}
    for content, name in [({"name": "llama-13b"}, "llama-13b"), ({}, "renamed"), ({"name": "../x"}, "renamed")]:
        (folder / MANIFEST_FILE).write_bytes(encode_manifest({**needed, **content}))
        assert locate("renamed").model_name == name


def test_a_broken_manifest_is_named(here: Path) -> None:
    (fill(here / "m", "_METADATA") / MANIFEST_FILE).write_text("{")
    assert refusal("m")[0] == f"m/{MANIFEST_FILE} is broken"


def test_a_path_goes_before_an_alias_and_a_hub_id(here: Path, downloads: list[object]) -> None:
    fill(here / "llama-13b", "model.safetensors")
    fill(here / "owner", "name/model.safetensors")
    assert locate("llama-13b").hub_id is None
    assert locate("owner/name").hub_id is None
    assert downloads == []


def test_an_alias_stands_for_its_hub_id_and_names_the_outputs(here: Path, downloads: list[object]) -> None:
    found = locate("llama-3-8b")
    assert found == LocatedCheckpoint(
        "llama-3-8b", here / "abc123", "safetensors", "meta-llama/Meta-Llama-3-8B", "abc123"
    )
    assert downloads == [("meta-llama/Meta-Llama-3-8B", None, False)]


def test_a_hub_id_names_the_outputs_by_its_last_part(here: Path, downloads: list[object]) -> None:
    assert locate("huggyllama/llama-13b", offline=True).model_name == "llama-13b"
    assert downloads == [("huggyllama/llama-13b", None, True)]


@pytest.mark.parametrize(
    ("name", "revision"),
    [("llama-13b@v1", None), ("llama-13b", "v1"), ("llama-13b@v1", "v1"), ("huggyllama/llama-13b@v1", None)],
)
def test_a_revision_follows_an_at_or_the_option(
    here: Path, downloads: list[object], name: str, revision: str | None
) -> None:
    assert locate(name, revision).model_name == "llama-13b"
    assert downloads == [("huggyllama/llama-13b", "v1", False)]


def test_a_revision_may_have_slashes(here: Path, downloads: list[object]) -> None:
    locate("llama-13b@refs/pr/1")
    assert downloads == [("huggyllama/llama-13b", "refs/pr/1", False)]


def test_two_revisions_are_one_too_many(here: Path) -> None:
    assert refusal("llama-13b@v1", revision="v2") == (
        "`llama-13b@v1` names no single revision", "`@v1` and `--revision v2`", "`llama-13b@v2`", USAGE,
    )  # fmt: skip
    assert refusal("llama-13b@") == (
        "`llama-13b@` names no single revision", "nothing follows the @", "`llama-13b@main`", USAGE,
    )  # fmt: skip


def test_a_folder_has_no_revision_but_may_have_an_at(here: Path) -> None:
    fill(here / "m@v1", "model.safetensors")
    assert locate("m@v1").model_name == "m@v1"
    assert refusal("m@v1", revision="v2")[0] == "`m@v1` is a folder and has no revision v2"


def test_a_typing_error_is_guessed(here: Path) -> None:
    assert refusal("gpt-neo-1.3b") == (
        "no checkpoint called `gpt-neo-1.3b`",
        "not a folder here, not an alias, and a hub id has the form owner/name",
        "did you mean `gpt-neo-1.3B`?",
        USAGE,
    )


def test_folders_here_are_guessed_too(here: Path) -> None:
    fill(here / "my-own-model-init", "_METADATA")
    assert refusal("my-own-model-int")[2] == "did you mean `my-own-model-init`?"


def test_without_a_guess_the_list_is_named(here: Path) -> None:
    assert refusal("zzz")[2] == "`prep models` lists the aliases"


@pytest.mark.parametrize("name", ["", "a b/c", "-x/y", "owner/", "öwner/name", "~nobody/x", "a\0b", "x" * 9999])
def test_what_is_no_hub_id_is_never_asked_for(here: Path, downloads: list[object], name: str) -> None:
    assert refusal(name)[3] == USAGE
    assert downloads == []


def test_a_missing_path_lists_the_folders_here(here: Path) -> None:
    for name in ("llama-13b", "llama-13b-init", ".hidden", "llama-13b-init.partial"):
        fill(here / name)
    fill(here, "file.txt")
    assert refusal("./llama") == (
        "`./llama` does not exist",
        "it looks like a path because it begins with `./`",
        "folders here: llama-13b, llama-13b-init",
        USAGE,
    )


def test_a_missing_path_elsewhere_lists_the_folders_there(here: Path) -> None:
    fill(here / "checkpoints", "a/x", "b/x")
    missing = here / "checkpoints" / "c"
    assert refusal(str(missing)) == (
        f"`{missing}` does not exist",
        "it looks like a path because it begins with `/`",
        f"folders in {here / 'checkpoints'}: a, b",
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
def test_why_something_looks_like_a_path(here: Path, name: str, reason: str) -> None:
    assert refusal(name)[1] == f"it looks like a path because it {reason}"


def test_a_long_list_of_folders_is_cut(here: Path) -> None:
    for number in range(12):
        fill(here / f"m{number:02d}")
    assert refusal("./x")[2] == "folders here: m00, m01, m02, m03, m04, m05, m06, m07 …"


def test_the_one_prep_folder_is_the_default(here: Path) -> None:
    fill(here / "llama-13b", "model.safetensors")
    fill(here / "llama-13b-init", "_METADATA", MANIFEST_FILE)
    fill(here / "x-init.partial", MANIFEST_FILE)
    assert default_checkpoint(here) == here / "llama-13b-init"


def test_without_a_prep_folder_there_is_no_default(here: Path) -> None:
    fill(here / "llama-13b", "model.safetensors")
    with pytest.raises(PrepError) as caught:
        default_checkpoint(here)
    assert message(caught.value) == (
        "no checkpoint was named", f"no folder here holds a {MANIFEST_FILE}", "name a folder, alias or hub id", USAGE,
    )  # fmt: skip


def test_several_prep_folders_are_listed_unless_the_command_takes_only_one_of_them(here: Path) -> None:
    for name in ("b-init", "a-1x64x4"):
        fill(here / name, "_METADATA", MANIFEST_FILE)
    with pytest.raises(PrepError) as caught:
        default_checkpoint(here)
    assert message(caught.value) == (
        "no checkpoint was named", "2 folders here could be meant", "one of: ./a-1x64x4, ./b-init", USAGE,
    )  # fmt: skip
    assert default_checkpoint(here, lambda folder: folder.name.endswith("-init")) == here / "b-init"


def test_a_run_is_a_default_and_is_called_as_its_steps_say(here: Path) -> None:
    needed = {"kind": "hf", "request": "", "plan": "", "config": {}, "tensors": {}, "prefixed": True, "tied": True}
    for step in ("9", "10"):
        (here / "first" / step).mkdir(parents=True)
        fill(here / "first" / step / "state", "_METADATA")
        name = {"name": f"tuned-{step}"}
        (here / "first" / step / MANIFEST_FILE).write_bytes(encode_manifest({**needed, **name}))
    (here / "second/5").mkdir(parents=True)
    fill(here / "second/5/state", "_METADATA")
    assert default_checkpoint(here) == here / "first"
    assert [locate(f"./first{end}", cwd=here).model_name for end in ("", "/9", "/10/state")] == [
        "tuned-10",
        "tuned-9",
        "tuned-10",
    ]
