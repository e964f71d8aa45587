"""Options that are rejected: out of range, in conflict, or without effect."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from prepcli.commands.console.ui import open_ui
from prepcli.commands.operations.export_request import parse_shard_size
from prepcli.commands.operations.save_init import save_init
from prepcli.core.errors import PrepError
from prepcli.engine.budget import MIN_MEMORY_NBYTES, parse_memory
from tests.helpers.run_cli import error_lines, run_ok
from tests.helpers.tiny_checkpoints import GPT_NEO, make_checkpoint

CONFLICTS = [
    (["--multiple", "8", "--size", "300"], "`--multiple 8` and `--size 300` exclude each other"),
    (["--size", "300", "--mesh", "1,1,8"], "`--size 300` and `--mesh 1,1,8` exclude each other"),
    (
        ["--multiple", "8", "--mesh", "1,1,8"],
        "`--multiple 8` and `--mesh 1,1,8` exclude each other",
    ),
]
OPTIONS_WITHOUT_EFFECT = [
    (["pad-vocab", "./m", "--seed", "3"], "--seed", "--init normal"),
    (["save-init", "./m", "--init", "mean"], "--init", "--pad-vocab"),
    (["save-init", "./m", "--seed", "3"], "--seed", "--pad-vocab"),
    (
        ["save-init", "./m", "--pad-vocab", "8", "--init", "mean", "--seed", "3"],
        "--seed",
        "--init normal",
    ),
    (["save-init", "./m", "--pad-vocab", "auto"], "--pad-vocab auto", "--mesh"),
    (["save-init", "./m", "--no-scan", "--scan-axis", "1"], "--scan-axis", "--scan"),
    (["save-init", "./m", "--allow-overflow"], "--allow-overflow", "--dtype"),
    (["reshard", "./unstacked", "--scan-axis", "1"], "--scan-axis", "--scan"),
    (["export", "./unstacked", "--allow-overflow"], "--allow-overflow", "--dtype"),
    (["generate", "./m", "--tokens", "1", "--top-k", "5"], "--top-k", "--temperature"),
    (["generate", "./m", "--tokens", "1", "--top-p", "0.5"], "--top-p", "--temperature"),
    (["generate", "./m", "--tokens", "1", "--seed", "5"], "--seed", "--temperature"),
]
STREAMED_FOLDERS = [
    ["save-init", "./m", "--stream"],
    ["verify", "./unstacked", "--stream"],
    ["verify", "./unstacked", "./m", "--stream"],
    ["inspect", "./m", "--stream"],
    ["inspect", "./m", "--diff", "./m", "--stream"],
]


def _test_id(value: object) -> str:
    return " ".join(value) if isinstance(value, list) else ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a Hugging Face folder `m` and its init `unstacked`."""
    folder = tmp_path_factory.mktemp("options")
    make_checkpoint(folder / "m", GPT_NEO, vocab_size=131, hidden_size=32)
    run_ok("save-init", str(folder / "m"), "--no-scan", "--out", str(folder / "unstacked"))
    return folder


@pytest.fixture
def work_dir(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(("words", "what"), CONFLICTS, ids=_test_id)
def test_vocabulary_sizes_are_mutually_exclusive(
    words: list[str], what: str, work_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error_lines(capsys, "pad-vocab", "./m", *words)[0] == f"error: {what}"
    assert {path.name for path in work_dir.iterdir()} == {"m", "unstacked"}


@pytest.mark.parametrize(("words", "option", "needed"), OPTIONS_WITHOUT_EFFECT, ids=_test_id)
def test_options_without_effect_are_rejected(
    words: list[str], option: str, needed: str, work_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    what, _, hint = error_lines(capsys, *words)
    assert what == f"error: `{option}` has no effect without `{needed}`"
    assert hint == f" hint: add `{needed}`, or remove `{option}`"
    assert {path.name for path in work_dir.iterdir()} == {"m", "unstacked"}


@pytest.mark.parametrize("words", STREAMED_FOLDERS, ids=_test_id)
def test_stream_is_rejected_for_local_folders(
    words: list[str], work_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    what, _, hint = error_lines(capsys, *words)
    assert (what, hint) == ("error: `--stream` has no effect", " hint: remove `--stream`")


def test_sort_is_rejected_with_diff(work_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        error_lines(capsys, "inspect", "./m", "--diff", "./m", "--sort", "size")[0]
        == "error: `--sort size` has no effect"
    )


def test_empty_mesh_in_library_call_is_rejected(work_dir: Path) -> None:
    with pytest.raises(PrepError, match="invalid `mesh=''`"):
        save_init("./m", "out", mesh="")
    # The operation has a check of its own, for callers whose arguments are not checked first.
    silent = open_ui("save-init", as_json=False, quiet=True, verbose=0, progress="none")
    with pytest.raises(PrepError, match="`mesh` is empty"):
        save_init("./m", "out", progress=silent, mesh="")


def test_empty_mesh_in_recipe_is_rejected(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = work_dir.parent / "recipe.toml"
    recipe.write_text(
        '[model]\npath = "m"\n[data]\ntype = "text"\npath = "a.txt"\nseq_length = 8\n[batch]\nsize = 1\n'
        "[optimizer]\nlr = 1.0\n[train]\nsteps = 1\n"
    )
    assert (
        error_lines(capsys, "train", str(recipe), "--set", "mesh=")[0]
        == "error: `--set`: `mesh` is empty"
    )
    assert (
        error_lines(capsys, "train", str(recipe), "--set", 'mesh=""')[0]
        == "error: `--set`: `mesh` is empty"
    )


@pytest.mark.parametrize("text", ["5", "0", "0GB", "1048575", "999 "])
def test_small_shard_size_without_unit_is_rejected(text: str) -> None:
    with pytest.raises(PrepError, match="`shard_size=") as caught:
        parse_shard_size(text)
    assert caught.value.code == 2


def test_shard_size_hint_has_a_unit() -> None:
    with pytest.raises(PrepError) as caught:
        parse_shard_size("5")
    assert (caught.value.why, caught.value.hint) == (
        "a number without a unit is in bytes: 5 bytes",
        "`--shard-size 5GB`",
    )


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1048576", 1 << 20), ("8KB", 8000), ("5GB", 5 * 10**9)]
)
def test_shard_size_with_unit_may_be_small(text: str, nbytes: int) -> None:
    assert parse_shard_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "why"),
    [("5", "it is 5 bytes; "), ("8MiB", ""), ("31.5 MiB", ""), ("0", "it is 0 bytes; ")],
)
def test_small_memory_is_quoted_as_typed(text: str, why: str) -> None:
    with pytest.raises(PrepError) as caught:
        parse_memory(text)
    # As it has to be typed in a shell, where a value with a space stands in quotes.
    assert caught.value.what == f"`--memory {shlex.quote(text)}` is below the minimum"
    assert caught.value.why.startswith(f"{why}the engine needs")
    assert caught.value.hint == "`--memory 32MiB` or more"


def test_minimum_memory_equals_the_hint() -> None:
    assert parse_memory("32MiB") == MIN_MEMORY_NBYTES


@pytest.mark.parametrize("option", [("--memory", "5"), ("--processes", "4")])
def test_dry_run_rejects_invalid_options(
    option: tuple[str, str], work_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error_lines(capsys, "save-init", "./m", "--dry-run", *option)[0].startswith(
        f"error: `{' '.join(option)}` is "
    )
