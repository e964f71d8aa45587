"""Side files in subfolders are copied with their place, by every command and from every source."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from prepcli.sources import side_files
from prepcli.sources.side_files import ListedFile, select_side_files
from tests.helpers.adapters import make_adapter
from tests.helpers.fork_server import start_python
from tests.helpers.hub_server import FakeRepo, serve_hub
from tests.helpers.object_server import use_objects
from tests.helpers.run_cli import run_failing, run_ok
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.tokenizer_folders import write_model

pytestmark = pytest.mark.waits

NESTED = {
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "1_Pooling/config.json": b'{"word_embedding_dimension": 32}',
    "processor/image/preprocessor_config.json": b"{}",
}
# Weights and their folder, and links, in a subfolder.
LEFT = {
    "onnx/model.onnx": b"weights",
    "onnx/config.json": b"{}",
    "original/mp/consolidated.00.pth": b"w",
}
PREP_SCRIPT = "import sys; from prepcli.commands.cli.main import main; sys.exit(main())"


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def make_model(folder: Path = Path("m")) -> None:
    """Write a model with side files and weights in subfolders."""
    make_checkpoint(folder, LLAMA)
    write_files(folder, NESTED | LEFT | {"original/tokenizer.model": b"pieces"})


def nested_files(folder: Path) -> dict[str, bytes]:
    """Return the files in subfolders of a model's folder."""
    files: dict[str, bytes] = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and "/" in name:
            files[name] = path.read_bytes()
    return files


EXPECTED = NESTED | {"original/tokenizer.model": b"pieces"}


def assert_left_out(error: str) -> None:
    lines = [line for line in error.splitlines() if line.startswith("left out: ")]
    assert lines == ["left out: onnx/ (weights), original/mp/ (weights)"]


def test_save_init_and_its_outputs_keep_nested_files(capsys: pytest.CaptureFixture[str]) -> None:
    make_model()
    assert main(["save-init", "./m", "--out", "init"]) == 0
    assert_left_out(capsys.readouterr().err)
    assert nested_files(Path("init/hf")) == EXPECTED
    recorded = json.loads(Path("init/prep-manifest.json").read_text())["files"]
    assert {f"hf/{name}" for name in EXPECTED} <= recorded.keys()
    run_ok("reshard", "init", "--mesh", "1,2,1", "--out", "wide")
    capsys.readouterr()
    assert main(["export", "wide", "--out", "back"]) == 0
    assert "left out" not in capsys.readouterr().err
    assert nested_files(Path("back")) == EXPECTED
    run_ok("verify", "back", "./m")
    run_ok("verify", "back", "--chain")
    Path("back/1_Pooling/config.json").write_bytes(b"{}")
    assert "1_Pooling/config.json is damaged" in run_failing(capsys, 1, "verify", "back")


def test_pad_vocab_keeps_nested_files(capsys: pytest.CaptureFixture[str]) -> None:
    make_model()
    assert main(["pad-vocab", "./m", "--out", "padded"]) == 0
    assert_left_out(capsys.readouterr().err)
    assert nested_files(Path("padded")) == EXPECTED


def test_add_tokens_keeps_nested_files() -> None:
    write_model(Path("m"))
    # A tokenizer in a subfolder is not the model's.
    write_files(Path("m"), NESTED | {"processor/tokenizer.json": b"another"})
    Path("tokens.txt").write_text("<new>\n")
    run_ok("add-tokens", "./m", "--tokens", "tokens.txt", "--out", "added")
    assert nested_files(Path("added")) == NESTED | {"processor/tokenizer.json": b"another"}


def test_merge_keeps_nested_files() -> None:
    make_model()
    make_adapter(Path("a"), {"model.layers.0.self_attn.q_proj": (32, 32)})
    run_ok("merge", "a", "./m", "--out", "merged")
    assert nested_files(Path("merged")) == EXPECTED


def test_copy_selects_files_of_a_subfolder(capsys: pytest.CaptureFixture[str]) -> None:
    make_model()
    write_files(Path("m"), {"code/modeling.py": b"code", "modeling.py": b"code"})
    run_ok("save-init", "./m", "--out", "plain")
    assert "code/modeling.py" not in nested_files(Path("plain/hf"))
    run_ok("save-init", "./m", "--copy", "code/*", "--copy", "onnx/*", "--out", "init")
    assert nested_files(Path("init/hf")) == EXPECTED | {
        "code/modeling.py": b"code",
        "onnx/config.json": b"{}",
    }
    assert not Path("init/hf/modeling.py").exists()
    error = run_failing(capsys, 2, "save-init", "./m", "--copy", "absent/*", "--out", "x")
    assert "matches no file" in error


def test_links_that_leave_the_folder_are_not_copied(capsys: pytest.CaptureFixture[str]) -> None:
    make_model()
    write_files(Path("outside"), {"secret.json": b"secret"})
    Path("m/linked").symlink_to(Path("outside").resolve())
    Path("m/1_Pooling/inner").symlink_to(Path("outside").resolve())
    assert main(["save-init", "./m", "--out", "init"]) == 0
    error = capsys.readouterr().err
    assert "linked/ (a link)" in error
    assert "1_Pooling/inner/ (a link)" in error
    assert nested_files(Path("init/hf")) == EXPECTED
    Path("m/1_Pooling/secret.json").symlink_to(Path("outside/secret.json").resolve())
    assert "is a link to" in run_failing(capsys, 1, "save-init", "./m", "--out", "x")


def test_large_subfolders_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(side_files, "MAX_FILES", 3)
    monkeypatch.setattr(side_files, "MAX_NBYTES", 100)
    make_checkpoint(Path("m"), LLAMA)
    many = {f"many/{i}.json": b"{}" for i in range(4)}
    write_files(Path("m"), many | {"big/a.txt": bytes(101), "few/a.json": b"{}"})
    assert main(["save-init", "./m", "--out", "init"]) == 0
    assert "left out: big/ (101 bytes, the limit is 100 bytes), many/ (more than 3 files)" in (
        capsys.readouterr().err
    )
    assert nested_files(Path("init/hf")) == {"few/a.json": b"{}"}
    error = run_failing(capsys, 1, "save-init", "./m", "--copy", "many/*", "--out", "x")
    assert "many/ has more than 3 files" in error


def test_other_checkpoints_in_the_folder_are_left() -> None:
    make_checkpoint(Path("m"), LLAMA)
    run_ok("save-init", "./m", "--out", "init")
    Path("m/outputs/old").mkdir(parents=True)
    os.rename("init", "m/outputs/old/init")
    write_files(Path("m"), {".cache/a.json": b"{}", "runs/events.out.tfevents.1": b"log"})
    run_ok("pad-vocab", "./m", "--out", "padded")
    assert nested_files(Path("padded")) == {}


def test_unread_weights_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(Path("m"), LLAMA)
    write_files(Path("m"), {"consolidated.safetensors": b"", "training_args.bin": b""})
    assert main(["save-init", "./m", "--out", "init"]) == 0
    assert "left out: consolidated.safetensors (other weights)\n" in capsys.readouterr().err


@pytest.mark.parametrize("options", [(), ("--stream",)], ids=["download", "stream"])
def test_nested_files_of_a_hub_model_are_copied(options: tuple[str, ...]) -> None:
    make_model()
    files = {path.relative_to("m").as_posix(): path.read_bytes() for path in Path("m").rglob("*.*")}
    files = {name: data for name, data in files.items() if name != "1_Pooling"}
    large = tuple(name for name in files if name.endswith(".safetensors"))
    with serve_hub({"o/m": FakeRepo(files, large=large)}) as hub:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        environment = inherited | hub.environment(Path.cwd() / "home")
        words = ("save-init", "o/m", "--out", "init", *options)
        process = start_python(PREP_SCRIPT, *words, cwd=Path.cwd(), env=environment)
        _, error = process.communicate()
    assert process.returncode == 0, error
    assert_left_out(error.decode())
    assert nested_files(Path("init/hf")) == EXPECTED
    assert not list(Path("home").rglob("model.onnx"))


def test_nested_files_in_a_bucket_are_copied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model()
    objects: dict[str, bytes] = {}
    for path in Path("m").rglob("*"):
        if path.is_file():
            objects[f"bucket/m/{path.relative_to('m').as_posix()}"] = path.read_bytes()
    with use_objects(monkeypatch, objects):
        assert main(["save-init", "gs://bucket/m", "--out", "init"]) == 0
        assert_left_out(capsys.readouterr().err)
        run_ok("export", "init", "--out", "gs://bucket/back")
        run_ok("verify", "gs://bucket/back", "./m")
    assert nested_files(Path("init/hf")) == EXPECTED


def test_nested_files_are_locked(capsys: pytest.CaptureFixture[str]) -> None:
    make_model()
    run_ok("lock", "./m", "--out", "m.lock.json")
    run_ok("save-init", "./m", "--lock", "m.lock.json", "--out", "init")
    Path("m/1_Pooling/config.json").write_bytes(b"{}")
    error = run_failing(capsys, 1, "save-init", "./m", "--lock", "m.lock.json", "--out", "other")
    assert "1_Pooling/config.json" in error


def test_hostile_names_are_left() -> None:
    names = ["a/\x1b[31m.json", "b/../../x.json", "c//d.json", "/e/f.json", "..", "d/" * 9 + "e"]
    selected = select_side_files([ListedFile(name, 1) for name in names])
    assert selected.copied == ()
    assert all(text.isprintable() for text in selected.omitted)
