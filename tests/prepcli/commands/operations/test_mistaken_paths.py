"""Paths and files that users mistake: each ends in one error with the way out, before any work."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.commands.operations.recipes import shipped_recipe
from prepcli.core.errors import FAILED, OK, USAGE
from prepcli.engine.pipeline import Pipeline
from tests.helpers.adapters import make_adapter
from tests.helpers.run_cli import Capture, MonkeyPatch, run_failing, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.trainer_checkpoints import make_trainer_checkpoint


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


MISTAKES = [  # code, command, parts of the error
    (FAILED, "export hub/", ("`hub` holds no checkpoint", "name `hub/m`")),
    (
        FAILED,
        "inspect models/init --source-layout tunixx",
        ("`--source-layout tunixx` is unknown", "did you mean `tunix`?"),
    ),
    (
        FAILED,
        "save-init m --config models/init",
        ("models/init has no config.json", "`--config models/init/hf`"),
    ),
    (USAGE, "save-init m --out /", ("the source is inside the output /", "it would be deleted")),
    (
        USAGE,
        "roundtrip m --layout init --out m/proof.json",
        ("the output m/proof.json is inside the source", "`--out ../proof.json`"),
    ),
    (
        FAILED,
        "roundtrip m --layout init --out proofs/m.json",
        ("cannot read or write proofs/m.json", "create the folder proofs"),
    ),
    (
        FAILED,
        "map suggest m models/init --out maps/m.map",
        ("cannot read or write maps/m.map", "create the folder maps"),
    ),
    (
        FAILED,
        "lock m --out m/config.json/lock.json",
        ("cannot read or write", "another folder than m/config.json, which is a file"),
    ),
    # The lock file is not written either.
    (
        FAILED,
        "lock m --html pages/m.html",
        ("cannot read or write pages/m.html", "create the folder pages"),
    ),
    (FAILED, "report runs/typo", ("runs/typo does not exist",)),
    (FAILED, "roundtrip m --layout init --out models", ("models is not a file", "it is a folder")),
    (FAILED, "save-init m --map models", ("models is not a file", "name a file")),
    (USAGE, "verify models/init --chain --search archive", ("`--search archive` is not a folder",)),
    (
        FAILED,
        "launch slurm --out jobs/a.sh -- inspect m",
        ("cannot read or write jobs/a.sh", "create the folder jobs"),
    ),
    (
        FAILED,
        "launch slurm --out m/config.json/a.sh -- inspect m",
        ("cannot read or write", "another folder than m/config.json, which is a file"),
    ),
]


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(("code", "command", "parts"), MISTAKES, ids=lambda value: str(value))
def test_mistaken_path_is_one_error_with_a_hint(
    code: int, command: str, parts: tuple[str, ...], capsys: Capture
):
    before = sorted(Path().rglob("*"))
    error = " ".join(run_failing(capsys, code, *command.split()).split())
    for part in parts:
        assert part in error
    assert sorted(Path().rglob("*")) == before


@pytest.mark.usefixtures("models")
def test_run_without_a_step_is_not_read_from_its_subfolder(capsys: Capture):
    """The user trains on, instead of reading a checkpoint that happens to be there."""
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
        ["launch", "slurm", "gpt2", "--out=~/script"],
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
@pytest.mark.parametrize(
    "out", slow_except(["new/../x", "new/deep/../../x", "./new/../m/../x"], ["new/deep/../../x"])
)
def test_output_leaves_no_folder_on_its_way(out: str):
    before = {path.name for path in Path().iterdir()}
    assert main(["save-init", "m", "--out", out, "-q"]) == OK
    assert {path.name for path in Path().iterdir()} == {*before, "x"}


@pytest.mark.usefixtures("models")
def test_next_command_quotes_a_path_with_spaces(capsys: Capture):
    """Each shown command is run as a shell would split it."""
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
# Files beside the weights, and files in place of them.
SIDE_FILES = (
    *("config.json", "tokenizer.json", "tokenizer.model", "generation_config.json", "vocab.json"),
    *("tokenizer_config.json", "chat_template.jinja", "README.md"),
)
WEIGHT_FILES = (
    *(WEIGHTS, "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    *("flax_model.msgpack", "consolidated.00.pth"),
)


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
@pytest.mark.parametrize("name", slow_except(SIDE_FILES, ("config.json", "tokenizer.model")))
def test_pointers_beside_the_weights_are_not_converted(name: str, capsys: Capture):
    Path("m", name).write_bytes(POINTER)
    check_error(capsys, "save-init", "./m", "--out", "init", file=name)
    check_error(capsys, "pad-vocab", "./m", "--multiple", "8", "--out", "padded", file=name)
    check_error(capsys, "lock", "./m", "--out", "lock.json", file=name)
    assert sorted(path.name for path in Path().iterdir()) == ["m"]


@pytest.mark.usefixtures("pointer_model")
@pytest.mark.parametrize(
    "name",
    slow_except(
        WEIGHT_FILES, ["model.safetensors", "pytorch_model.bin.index.json", "consolidated.00.pth"]
    ),
)
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
@pytest.mark.parametrize(
    "name",
    slow_except(("x.gguf", "x.safetensors", "x.pt", "x.msgpack", "stream"), ("x.gguf", "x.pt")),
)
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


COPYING_COMMANDS = {
    "save-init": ["save-init", "model", "--mesh", "1,1,1"],
    "pad-vocab": ["pad-vocab", "model", "--multiple", "8"],
    "export": ["export", "init"],
}


@pytest.mark.parametrize(
    "command",
    slow_except(COPYING_COMMANDS.values(), [COPYING_COMMANDS["save-init"]]),
    ids=COPYING_COMMANDS,
)
def test_unreadable_tokenizer_fails_before_weights_are_moved(
    command: list[str], monkeypatch: MonkeyPatch, capsys: Capture
):
    make_checkpoint(Path("model"), LLAMA)
    Path("model/tokenizer.json").write_text("{}")
    assert main(["save-init", "model", "--mesh", "1,1,1", "--out", "init", "-q"]) == OK
    capsys.readouterr()
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
    assert main([*command, "--out", "output", "-q"]) == FAILED
    error = capsys.readouterr().err
    assert "tokenizer.json" in error
    assert "Permission denied" in error
