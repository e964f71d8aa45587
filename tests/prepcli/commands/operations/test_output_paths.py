"""Existing outputs are kept, links are not followed, paths stay inside of an output, and mistakes are named."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

import prepcli as prep
from prepcli.algebra.grids import ChunkGrid
from prepcli.commands.cli.main import main
from prepcli.commands.operations.conversion import check_output_paths
from prepcli.commands.operations.recipes import shipped_recipe
from prepcli.core.errors import FAILED, OK, USAGE, PrepError, UsageError
from prepcli.core.observer import NullProgress
from prepcli.engine.pipeline import Pipeline
from prepcli.execution import folder_converter
from prepcli.execution.hub_push import PushTarget, push_folder
from prepcli.formats.manifest import MANIFEST_FILE
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import OutputFile, OutputLeaf, Plan, SmallFile
from prepcli.stores.addresses import ObjectStoreUrl, parse_out_url
from tests.helpers.adapters import make_adapter
from tests.helpers.killing import read_files
from tests.helpers.run_cli import (
    Capture,
    MonkeyPatch,
    exported_tensors,
    run_failing,
    run_failing_unchanged,
    run_ok,
)
from tests.helpers.tiny_checkpoints import LLAMA, assert_same, make_checkpoint, read_tensors
from tests.helpers.trainer_checkpoints import make_trainer_checkpoint
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
    for words, error in (
        (["m"], "the output m is the source"),
        (["m/x"], "the output m/x is inside the source"),
        ([".", "--overwrite"], "the source is inside the output ."),
    ):
        _, lines = run_failing_unchanged(capsys, "save-init", "./m", "--out", *words)
        assert lines[0] == f"error: {error}"
    monkeypatch.chdir("m")
    _, lines = run_failing_unchanged(capsys, "save-init", ".")
    assert lines[0] == "error: the output m-init is inside the source"


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
    with pytest.raises(PrepError, match="is a link to"), open_manager(Path("run"), Path("init")):
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
    copied = Path("padded/tokenizer_config.json").read_bytes()
    assert copied == Path("m/tokenizer_config.json").read_bytes()
    assert not Path("padded/tokenizer_config.json").is_symlink()
    assert read_tensors(Path("padded"))


@pytest.mark.usefixtures("linked_model")
def test_link_created_after_planning_is_rejected(monkeypatch: MonkeyPatch, capsys):
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


def save_init_refuses_link(capsys: Capture) -> bool:
    capsys.readouterr()
    code = main(["save-init", "./model", "--out", "out", "-q"])
    err = capsys.readouterr().err
    return code == 1 and "is a symbolic link" in err and "Traceback" not in err


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize("file", [".prep/lock", "hf/config.json"])
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
    ["out.partial", "out.partial/.prep", "out.partial/.prep/done", "out.partial/d"],
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
    for local in (None, Path("a/b"), Path("/a/b"), Path("a:b"), Path("../a")):
        assert parse_out_url(local) is None
    with pytest.raises(PrepError) as caught:
        parse_out_url(Path("abfs://bucket/a"))
    assert caught.value.code == 2


@pytest.mark.parametrize("text", ["gs://", "s3://"])
def test_url_without_a_bucket_is_no_local_folder(text: str):
    """As `gs://$BUCKET` of an unset variable."""
    with pytest.raises(PrepError, match="is an invalid URL") as caught:
        parse_out_url(Path(text))
    assert caught.value.what.startswith(f"`{text}`")


# Paths and files that users mistake: each ends in one error with the way out, before any work


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model `m`, a copy `hub/m` and `models/init` made from it. Tests only copy it."""
    folder = tmp_path_factory.mktemp("models")
    make_checkpoint(folder / "m", LLAMA)
    shutil.copytree(folder / "m", folder / "hub" / "m")
    run_ok("save-init", str(folder / "m"), "--out", str(folder / "models" / "init"))
    return folder


@pytest.fixture
def models(template: Path, tmp_path: Path) -> None:
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)


# Exit code | command | parts of the error
MISTAKES = """
1 | export hub/ | `hub` holds no checkpoint | name `hub/m`
1 | inspect models/init --source-layout tunixx | `--source-layout tunixx` is unknown | did you mean `tunix`?
1 | save-init m --config models/init | models/init has no config.json | `--config models/init/hf`
2 | save-init m --out / | the source is inside the output / | it would be deleted
2 | roundtrip m --layout init --out m/proof.json | m/proof.json is inside the source | `--out ../proof.json`
1 | roundtrip m --layout init --out proofs/m.json | cannot read or write proofs/m.json | create the folder proofs
1 | map suggest m models/init --out maps/m.map | cannot read or write maps/m.map | create the folder maps
1 | lock m --out m/config.json/lock.json | cannot read or write | another folder than m/config.json, which is a file
1 | lock m --html pages/m.html | cannot read or write pages/m.html | create the folder pages
1 | report runs/typo | runs/typo does not exist
1 | roundtrip m --layout init --out models | models is not a file | it is a folder
1 | save-init m --map models | models is not a file | name a file
2 | verify models/init --chain --search archive | `--search archive` is not a folder
1 | launch slurm --out jobs/a.sh -- inspect m | cannot read or write jobs/a.sh | create the folder jobs
1 | launch slurm --out m/config.json/a.sh -- inspect m | another folder than m/config.json, which is a file
"""


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("row", MISTAKES.strip().splitlines())
def test_mistaken_path_is_one_error_with_a_hint(row: str, capsys: Capture):
    code, command, *parts = row.split(" | ")
    before = sorted(Path().rglob("*"))
    error = " ".join(run_failing(capsys, int(code), *command.split()).split())
    for part in parts:
        assert part in error
    assert sorted(Path().rglob("*")) == before


@pytest.mark.usefixtures("models")
def test_run_without_a_step_is_not_read_from_its_subfolder(capsys: Capture):
    for name in ("recipe.toml", "environment.json"):
        Path("hub", name).touch()
    error = run_failing(capsys, FAILED, "inspect", "hub")
    assert "no step of the run hub is saved yet" in error


@pytest.mark.usefixtures("models")
def test_empty_state_of_an_optimizer_is_damaged(capsys: Capture):
    make_trainer_checkpoint(Path("checkpoint-4"), 4)
    Path("checkpoint-4/optimizer.pt").write_bytes(b"")
    error = run_failing(capsys, FAILED, "save-init", "checkpoint-4", "--training-state")
    assert "optimizer.pt is damaged" in error
    assert "it is empty" in error


def test_home_folder_stands_for_a_tilde(monkeypatch: pytest.MonkeyPatch):
    """A shell leaves it in `--out=~/NAME`. A later `rm -r ~` would not remove the output alone."""
    monkeypatch.setenv("HOME", str(Path("home").absolute()))
    make_checkpoint(Path("home"), LLAMA)
    assert main(["save-init", "~", "--out=~/../first", "-q"]) == OK
    assert main(["lock", "home", "--out=~/../home.json", "-q"]) == OK
    prep.reshard("first", out=Path("~/../second"), mesh="1,1,1")
    make_adapter(Path("home/adapter"), {"model.layers.0.self_attn.q_proj": (32, 32)})
    prep.merge("~/adapter", "~", out="~/../third")
    assert Path("home.json").exists()
    assert Path("third/prep-manifest.json").exists()
    assert Path("second/prep-manifest.json").exists()
    assert not Path("~").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["recipes", "copy", "gpt2", "--out=~/script"],
        ["launch", "slurm", "~/own.toml", "--out=~/script"],
    ],
)
def test_commands_without_function_expand_a_tilde(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
):
    home = Path("home").absolute()
    home.mkdir()
    shutil.copy(shipped_recipe("gpt2"), home / "own.toml")
    monkeypatch.setenv("HOME", str(home))
    assert main([*words, "-q"]) == OK
    assert (home / "script").is_file()
    assert not Path("~").exists()


@pytest.mark.usefixtures("models")
def test_output_leaves_no_folder_on_its_way():
    before = {path.name for path in Path().iterdir()}
    assert main(["save-init", "m", "--out", "new/deep/../../x", "-q"]) == OK
    assert {path.name for path in Path().iterdir()} == {*before, "x"}


@pytest.mark.usefixtures("models")
def test_next_command_quotes_a_path_with_spaces(capsys: Capture):
    Path("m").rename("my model")
    assert main(["save-init", "my model", "--out", "an init"]) == OK
    assert "next: prep train RECIPE --set model.path='an init'\n" in capsys.readouterr().err
    assert main(["export", "an init", "--out", "my export"]) == OK
    command = capsys.readouterr().err.rpartition("next: ")[2].strip()
    assert command == "prep verify 'my export' 'an init'"
    assert main(shlex.split(command)[1:]) == OK


# Small outputs of commands: lock files, maps, certificates, pages and scripts are local files


COMMANDS = (
    "lock ./model --out gs://bucket/result",
    "lock ./model --html gs://bucket/result",
    "inspect ./model --html gs://bucket/result",
    "roundtrip ./model --out gs://bucket/result",
    "map suggest ./model ./model --out gs://bucket/result",
    "plan ./model --html gs://bucket/result",
    "report run --out gs://bucket/result",
    "recipes copy llama-7b --out gs://bucket/result",
    "launch slurm --out gs://bucket/result -- save-init ./model",
    "demo --out gs://bucket/result",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_small_outputs_in_a_bucket_are_refused(command: str, tmp_path: Path, capsys: Capture):
    make_checkpoint(Path("model"), LLAMA)
    error = run_failing(capsys, USAGE, *shlex.split(command))
    assert "cannot write gs://bucket/result" in error
    assert "name a local path" in error
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# Pointers of Git LFS in place of files: each command names the file and the command that gets it


POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    b"size 17209961\n"
)
WEIGHTS = "model.safetensors"


@pytest.fixture
def pointer_model() -> None:
    make_checkpoint(Path("m"), LLAMA, files=1)


def check_error(capsys: Capture, *command: str, file: str) -> None:
    """Assert that a command ends with the error for a pointer."""
    capsys.readouterr()
    assert main([*command]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    what, why, hint = captured.err.strip().splitlines()[-3:]
    assert what.endswith(f"{file} is a Git LFS pointer")
    assert why.strip() == "why: it only refers to the real file"
    assert hint.strip() == "hint: run `git lfs pull`"


@pytest.mark.usefixtures("pointer_model")
@pytest.mark.parametrize("name", ["config.json", "tokenizer.model"])
def test_pointers_beside_the_weights_are_not_converted(name: str, capsys: Capture):
    Path("m", name).write_bytes(POINTER)
    check_error(capsys, "save-init", "./m", "--out", "init", file=name)
    check_error(capsys, "pad-vocab", "./m", "--multiple", "8", "--out", "padded", file=name)
    check_error(capsys, "lock", "./m", "--out", "lock.json", file=name)
    assert sorted(path.name for path in Path().iterdir()) == ["m"]


@pytest.mark.usefixtures("pointer_model")
@pytest.mark.parametrize("name", [WEIGHTS, "pytorch_model.bin.index.json", "consolidated.00.pth"])
def test_pointers_in_place_of_weights_are_named(name: str, capsys: Capture):
    Path("m", WEIGHTS).unlink()
    Path("m", name).write_bytes(POINTER)
    check_error(capsys, "save-init", "./m", "--out", "init", file=name)
    check_error(capsys, "inspect", "./m", file=name)


@pytest.mark.usefixtures("pointer_model")
def test_pointer_in_place_of_one_shard_is_named(capsys: Capture):
    shutil.rmtree("m")
    make_checkpoint(Path("m"), LLAMA, files=3)
    shard = sorted(Path("m").glob("*.safetensors"))[-1]
    shard.write_bytes(POINTER)
    check_error(capsys, "save-init", "./m", "--out", "init", file=shard.name)


@pytest.mark.usefixtures("pointer_model")
@pytest.mark.parametrize("name", ["x.gguf", "x.pt", "x.msgpack"])
def test_pointer_in_place_of_a_single_file_is_named(name: str, capsys: Capture) -> None:
    Path(name).write_bytes(POINTER)
    check_error(capsys, "save-init", f"./{name}", "--out", "init", file=name)
    options = ("--quantized", "dequantize", "--out", "init")
    check_error(capsys, "save-init", f"./{name}", *options, file=name)
    check_error(capsys, "inspect", f"./{name}", file=name)
    check_error(capsys, "verify", f"./{name}", "./m", file=name)


@pytest.mark.usefixtures("pointer_model")
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_pointer_in_place_of_a_tokenizer_is_named(name: str, capsys: Capture):
    Path("m", name).write_bytes(POINTER)
    check_error(capsys, "generate", "./m", "--prompt", "x", file=name)
    Path("text.txt").write_text("x\n")
    check_error(capsys, "eval", "./m", "--data", "text.txt", file=name)
    Path("tokens.txt").write_text("<new>\n")
    options = ("--tokens", "tokens.txt", "--out", "more")
    check_error(capsys, "add-tokens", "./m", *options, file=name)


# Small files that cannot be copied stop a conversion before any weights are read


def test_unreadable_tokenizer_fails_before_weights_are_moved(
    monkeypatch: MonkeyPatch, capsys: Capture
):
    make_checkpoint(Path("model"), LLAMA)
    Path("model/tokenizer.json").write_text("{}")
    real_open = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        # The tests may run as root, whom no permission stops.
        if os.fspath(path).endswith("tokenizer.json"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return real_open(path, *args, **options)

    def move(*args: object, **options: object) -> None:
        pytest.fail("weights were moved")

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(Pipeline, "run", move)
    assert main(["save-init", "model", "--out", "output", "-q"]) == FAILED
    error = capsys.readouterr().err
    assert "tokenizer.json" in error
    assert "Permission denied" in error


def fail(*arguments: object, **options: object) -> None:
    raise PrepError("the power is gone")


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
