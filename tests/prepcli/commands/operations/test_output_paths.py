"""Existing outputs are kept, links are not followed, and paths of files stay inside of an output."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from prepcli.algebra.grids import ChunkGrid
from prepcli.commands.cli.main import main
from prepcli.commands.operations.conversion import check_output_paths
from prepcli.core.errors import PrepError, UsageError
from prepcli.core.observer import NullProgress
from prepcli.execution import folder_converter
from prepcli.execution.hub_push import PushTarget, push_folder
from prepcli.formats.manifest import MANIFEST_FILE
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import OutputFile, OutputLeaf, Plan, SmallFile
from prepcli.stores.addresses import ObjectStoreUrl, parse_out_url
from tests.helpers.killing import read_files
from tests.helpers.run_cli import (
    Capture,
    MonkeyPatch,
    exported_tensors,
    run_failing,
    run_failing_unchanged,
    run_ok,
)
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import assert_same, make_checkpoint, read_tensors
from tests.helpers.training_states import open_manager


def test_output_of_another_request_is_not_replaced(capsys):
    make_checkpoint(Path("m"))
    Path("m-init").mkdir()
    Path("m-init/thesis.txt").write_text("years of work")
    assert run_failing_unchanged(capsys, "save-init", "./m") == (
        1,
        [
            "error: m-init exists and is something else",
            "  why: it has no prep-manifest.json: prep only replaces its own outputs",
            " hint: choose another `--out`, or remove it",
        ],
    )


def test_output_inside_the_source_is_refused(capsys, monkeypatch):
    make_checkpoint(Path("m"))
    assert (
        run_failing_unchanged(capsys, "save-init", "./m", "--out", "m")[1][0]
        == "error: the output m is the source"
    )
    assert (
        run_failing_unchanged(capsys, "save-init", "./m", "--out", "m/x")[1][0]
        == "error: the output m/x is inside the source"
    )
    assert (
        run_failing_unchanged(capsys, "save-init", "./m", "--out", ".", "--overwrite")[1][0]
        == "error: the source is inside the output ."
    )
    monkeypatch.chdir("m")
    assert (
        run_failing_unchanged(capsys, "save-init", ".")[1][0]
        == "error: the output m-init is inside the source"
    )


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_foreign_output_is_never_replaced(capsys, tmp_path: Path, kind: str):
    make_checkpoint(Path("m"))
    theirs = tmp_path / ("thesis.tex" if kind == "file" else "theirs/thesis.tex")
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("years of work")
    out = {"folder": "theirs", "file": "thesis.tex", "link": "link"}[kind]
    if kind == "link":
        Path(out).symlink_to("theirs")
    before = sorted(tmp_path.rglob("*"))
    code, lines = run_failing_unchanged(capsys, "save-init", "./m", "--out", out, "--overwrite")
    assert (code, lines[0]) == (1, f"error: {out} exists and is something else")
    assert theirs.read_text() == "years of work"
    assert sorted(tmp_path.rglob("*")) == before


def test_foreign_output_created_late_is_not_replaced(capsys, monkeypatch):
    make_checkpoint(Path("m"))
    assert main(["save-init", "./m", "--out", "whole", "-q"]) == 0
    original = folder_converter.write_last_files

    def write_and_create_output(*args: Any, **options: Any) -> Manifest:
        manifest = original(*args, **options)
        Path("out").mkdir()
        Path("out/thesis.tex").write_text("years of work")
        return manifest

    with monkeypatch.context() as patched:
        patched.setattr(folder_converter, "write_last_files", write_and_create_output)
        assert main(["save-init", "./m", "--out", "out", "--overwrite", "-q"]) == 1
    assert "error: out exists and is something else" in capsys.readouterr().err
    assert read_files(Path("out")) == {"thesis.tex": b"years of work"}
    Path("out").rename("theirs")
    assert main(["save-init", "./m", "--out", "out", "--overwrite", "-q"]) == 0
    assert read_files(Path("out")) == read_files(Path("whole"))


def test_empty_folder_is_replaced_by_overwrite(capsys):
    make_checkpoint(Path("m"))
    Path("out").mkdir()
    assert run_failing_unchanged(capsys, "save-init", "./m", "--out", "out")[0] == 1
    assert main(["save-init", "./m", "--out", "out", "--overwrite", "-q"]) == 0
    assert main(["verify", "out", "-q"]) == 0


def test_current_and_home_folders_are_never_replaced(capsys, monkeypatch, tmp_path: Path):
    make_checkpoint(tmp_path / "m")
    for folder in ("work/deep", "homes/me"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir("work/deep")
    monkeypatch.setenv("HOME", str(tmp_path / "homes/me"))
    for out in (tmp_path / "work", tmp_path / "homes", tmp_path / "homes/me", Path("../deep")):
        code, lines = run_failing_unchanged(
            capsys, "save-init", str(tmp_path / "m"), "--out", str(out), "--overwrite"
        )
        assert (code, lines[0]) == (
            2,
            f"error: the output {out} would replace the current folder or your home folder",
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["homes", "m", "work"]


@pytest.mark.slow
def test_loser_of_a_race_leaves_no_unfinished_output(capsys: Capture, monkeypatch: MonkeyPatch):
    make_checkpoint(Path("m"))
    winner = ("save-init", "./m", "--mesh", "1,2,1", "--out", "out")
    check_free_space = folder_converter.check_free_space
    commands = [winner]

    def publish_other(*arguments: Any) -> None:
        # Another command for the same output ends between the check of the output and the staging folder.
        check_free_space(*arguments)
        if commands:
            run_ok(*commands.pop())

    monkeypatch.setattr(folder_converter, "check_free_space", publish_other)
    assert main(["save-init", "./m", "--out", "out", "-q"]) == 1
    assert "out exists and is something else" in capsys.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["m", "out"]
    run_ok("save-init", "./m", "--no-scan", "--out", "out", "--overwrite")


@pytest.mark.slow
def test_unfinished_output_stays_when_another_command_publishes(
    capsys: Capture, monkeypatch: MonkeyPatch
):
    make_checkpoint(Path("m"))
    with monkeypatch.context() as patches:
        patches.setattr(folder_converter, "write_last_files", fail)
        assert main(["save-init", "./m", "--out", "out", "-q"]) == 1
    kept = read_files(Path("out.partial"))
    make_checkpoint(Path("other"))
    is_done = folder_converter.FolderConverter.is_done
    calls: list[object] = []

    def find_other(self: Any) -> bool:
        calls.append(self)
        if len(calls) == 2:
            run_ok("save-init", "./other", "--out", "elsewhere")
            Path("elsewhere").rename("out")
        return is_done(self)

    monkeypatch.setattr(folder_converter.FolderConverter, "is_done", find_other)
    assert main(["save-init", "./m", "--out", "out", "-q"]) == 1
    assert read_files(Path("out.partial")).keys() == kept.keys()


def fail(*arguments: object, **options: object) -> None:
    raise PrepError("the power is gone")


# Symbolic links in a checkpoint's folder: only targets inside the checkpoint are copied


@pytest.fixture
def linked_model() -> None:
    make_checkpoint(Path("m"))
    Path("secret").write_text("key")


@pytest.mark.usefixtures("linked_model")
@pytest.mark.parametrize("command", [["pad-vocab", "--multiple", "8"], ["save-init"]])
def test_command_rejects_small_file_linked_outside(command: list[str], capsys: Capture):
    Path("m/vocab.txt").symlink_to("../secret")
    for more in ([], ["--dry-run"]):
        err = run_failing(capsys, 1, command[0], "./m", *command[1:], "--out", "out", *more)
        assert "vocab.txt is a link to ../secret" in err
        assert "hint:" in err
    assert not Path("out").exists()
    assert not Path("out.partial").exists()
    assert main(["inspect", "./m", "-q"]) == 0  # inspect copies no files


@pytest.mark.usefixtures("linked_model")
@pytest.mark.parametrize("link", ["hf/vocab.txt", "hf"])
def test_export_rejects_links_in_init(link: str, capsys: Capture):
    run_ok("save-init", "./m", "--out", "init")
    if link == "hf":
        shutil.move("init/hf", "elsewhere")
    Path("init", link).symlink_to("../../secret" if link != "hf" else "../elsewhere")
    assert "is a link to" in run_failing(capsys, 1, "export", "init", "--out", "out")
    assert "is a link to" in run_failing(
        capsys, 1, "reshard", "init", "--mesh", "1,2,1", "--out", "out"
    )


@pytest.mark.usefixtures("linked_model")
def test_run_rejects_links_before_first_step():
    run_ok("save-init", "./m", "--out", "init")
    Path("init/hf/vocab.txt").symlink_to("../../secret")
    with (
        pytest.raises(PrepError, match="is a link to"),
        open_manager(Path("run"), Path("init")),
    ):
        pass


@pytest.mark.usefixtures("linked_model")
def test_weight_files_may_be_links():
    tensors = read_tensors(Path("m"))
    Path("elsewhere").mkdir()
    for path in Path("m").glob("*.safetensors*"):
        shutil.move(path, "elsewhere")
        path.symlink_to(f"../elsewhere/{path.name}")
    run_ok("save-init", "./m", "--out", "init")
    run_ok("verify", "init", "./m")
    assert_same(exported_tensors("init"), tensors)


@pytest.mark.usefixtures("linked_model")
def test_hub_cache_converts_with_its_links():
    home, blobs = Path("cache/models--o--m/snapshots/c0ffee"), Path("cache/models--o--m/blobs")
    home.mkdir(parents=True)
    blobs.mkdir()
    for path in Path("m").iterdir():
        shutil.copy(path, blobs)
        (home / path.name).symlink_to(f"../../blobs/{path.name}")
    run_ok("pad-vocab", f"./{home}", "--multiple", "8", "--out", "padded")
    assert (
        Path("padded/tokenizer_config.json").read_bytes()
        == Path("m/tokenizer_config.json").read_bytes()
    )
    assert not Path("padded/tokenizer_config.json").is_symlink()
    assert read_tensors(Path("padded"))


@pytest.mark.usefixtures("linked_model")
def test_link_created_after_planning_is_rejected(monkeypatch: MonkeyPatch, capsys):
    from prepcli.execution import folder_converter

    original = folder_converter.write_last_files

    def replace_file_by_link(*args: Any, **options: Any) -> Manifest:
        Path("m/tokenizer_config.json").unlink()
        Path("m/tokenizer_config.json").symlink_to("../secret")
        return original(*args, **options)

    monkeypatch.setattr(folder_converter, "write_last_files", replace_file_by_link)
    err = run_failing(capsys, 1, "pad-vocab", "./m", "--multiple", "8", "--out", "out")
    assert "tokenizer_config.json" in err
    assert not Path("out").exists()


@pytest.mark.usefixtures("linked_model")
def test_push_rejects_links_to_outside():
    folder = Path("m")
    (folder / "notes.txt").symlink_to("../secret")
    with pytest.raises(PrepError, match=r"notes\.txt is a link to \.\./secret"):
        push_folder(folder, PushTarget("owner/name"), progress=NullProgress())


# Symbolic links inside an output's folder are not followed


FILES = (
    ".prep/lock",
    ".prep/door",
    ".prep/run.json",
    ".prep/session",
    ".prep/source.json",
    ".prep/claims/0",
    ".prep/done/0",
    ".prep/part/0",
    "d/67b5a8e8f4d0ee6fb0c2e1d57e0b2b2e",
    "_METADATA",
    "manifest.ocdbt",
    "prep-manifest.json",
    "hf/config.json",
)


def save_init_refuses_link(capsys: Capture) -> bool:
    capsys.readouterr()
    code = main(["save-init", "./model", "--out", "out", "-q"])
    err = capsys.readouterr().err
    return code == 1 and "is a symbolic link" in err and "Traceback" not in err


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize("file", slow_except(FILES, [FILES[0], FILES[-1]]))
def test_save_init_rejects_file_links_in_partial_output(capsys, file: str):
    target, link = Path("target"), Path("out.partial", file)
    target.write_text("mine")
    Path("out.partial/.prep").mkdir(parents=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target.absolute())
    assert save_init_refuses_link(capsys)
    assert target.read_text() == "mine"
    link.unlink()
    assert main(["save-init", "./model", "--out", "out", "-q"]) == 0


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize(
    "folder",
    [
        "out.partial",
        "out.partial/.prep",
        "out.partial/.prep/done",
        "out.partial/d",
        "out.partial/hf",
    ],
)
def test_save_init_rejects_folder_links_in_partial_output(capsys, folder: str):
    target = Path("elsewhere")
    target.mkdir()
    if folder != "out.partial":
        Path("out.partial/.prep").mkdir(parents=True)
    if folder == "out.partial/.prep":
        Path(folder).rmdir()
    Path(folder).symlink_to(target.absolute())
    assert save_init_refuses_link(capsys)
    assert not list(target.iterdir())


@pytest.mark.usefixtures("sources")
def test_train_rejects_linked_lock(tmp_path: Path):
    Path("run").mkdir()
    Path("target").write_text("mine")
    Path("run/.lock").symlink_to(tmp_path / "target")
    with (
        pytest.raises(PrepError, match="is a symbolic link"),
        open_manager(Path("run"), Path("init")),
    ):
        pass
    assert Path("target").read_text() == "mine"


# Paths of the files of an output, checked in its plan


def make_plan(*paths: str, small: tuple[str, ...] = (), item: str = "") -> Plan:
    files = tuple(OutputFile(path, 1) for path in paths)
    return Plan("test", "", "", (), (), files, tuple(map(SmallFile, small)), item=item)


def make_tree(*names: str, small: tuple[str, ...] = ()) -> Plan:
    """Return a plan of arrays in folders of their own."""
    leaves = tuple(OutputLeaf((name,), "float32", ChunkGrid((1,), (1,)), ()) for name in names)
    return Plan(
        *("test", "", "", (), (), ()),
        small_files=tuple(map(SmallFile, small)),
        leaves=leaves,
        settings=Manifest(storage="files"),
    )


@pytest.mark.parametrize(
    "path", ["", "..", "../x", "a/../x", "/x", "a//b", "a/", "a\0b", "m" * 256]
)
@pytest.mark.parametrize("item", ["", "state"])
def test_path_that_leaves_the_output_is_refused(path: str, item: str):
    check_output_paths(make_plan("a/b", "a/c", small=("c", "d/e"), item=item))
    for plan in (make_plan(path, item=item), make_plan(small=(path,), item=item)):
        with pytest.raises(PrepError, match="cannot be a file of the output"):
            check_output_paths(plan)


@pytest.mark.parametrize("pair", [("a", "a"), ("a", "a/b"), ("a/b/c", "a/b"), ("x", MANIFEST_FILE)])
def test_two_files_of_one_path_are_refused(pair: tuple[str, str]):
    for plan in (make_plan(*pair, "x"), make_plan(pair[0], "z", small=("x", pair[1]))):
        with pytest.raises(PrepError, match=r"two files of the output|the folder of another"):
            check_output_paths(plan)


def test_similar_names_are_two_files():
    check_output_paths(make_plan("a", "a.b", "a0/b", "a-/b", "b/a", small=("ab", "A", "a.c")))


@pytest.mark.parametrize("name", ["..", ".", "a/b", "\0", "m" * 256, ""])
def test_leaf_without_a_folder_name_is_refused(name: str):
    check_output_paths(make_tree("params.w", "m" * 255))
    with pytest.raises(UsageError, match=r"cannot store .* each array is a folder of its name"):
        check_output_paths(make_tree("params.w", name))


@pytest.mark.parametrize("name", [".prep", "commit_success.txt", "_METADATA", MANIFEST_FILE, "hf"])
def test_leaf_in_place_of_a_file_is_refused(name: str):
    with pytest.raises(PrepError, match='storage="ocdbt"'):
        check_output_paths(make_tree("params.w", name, small=("hf/config.json",)))


def test_parse_out_url_accepts_a_path():
    assert parse_out_url(Path("gs://bucket/a/b")) == ObjectStoreUrl("gs", "bucket", "a/b")
    assert parse_out_url(Path("s3://bucket/a/")) == ObjectStoreUrl("s3", "bucket", "a")
    assert [
        parse_out_url(path) for path in (None, Path("a/b"), Path("/a/b"), Path("a:b"), Path("../a"))
    ] == [None] * 5
    with pytest.raises(PrepError) as caught:
        parse_out_url(Path("abfs://bucket/a"))
    assert caught.value.code == 2


@pytest.mark.parametrize("text", ["gs://", "s3://"])
def test_url_without_a_bucket_is_no_local_folder(text: str):
    """As `gs://$BUCKET` of an unset variable."""
    with pytest.raises(PrepError, match="is an invalid URL") as caught:
        parse_out_url(Path(text))
    assert caught.value.what.startswith(f"`{text}`")
