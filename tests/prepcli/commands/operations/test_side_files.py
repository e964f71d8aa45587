"""Side files in subfolders, and tensors outside of the index, from every source."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.sources import side_files
from prepcli.sources.side_files import ListedFile, select_side_files
from tests.helpers.adapters import make_adapter
from tests.helpers.fork_server import start_python
from tests.helpers.golden_flax import LLAMA as FLAX_LLAMA
from tests.helpers.golden_flax import decode_msgpack
from tests.helpers.hub_server import FakeRepo, serve_hub
from tests.helpers.object_server import use_objects
from tests.helpers.pickle_builder import make_torch_file
from tests.helpers.run_cli import (
    Capture,
    MonkeyPatch,
    exported_tensors,
    run_failing,
    run_json,
    run_ok,
)
from tests.helpers.tiny_checkpoints import LLAMA, assert_same, make_checkpoint, read_tensors

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


def test_pad_vocab_keeps_nested_files(capsys: Capture) -> None:
    make_model()
    assert main(["pad-vocab", "./m", "--out", "padded"]) == 0
    assert_left_out(capsys.readouterr().err)
    assert nested_files(Path("padded")) == EXPECTED
    Path("padded/1_Pooling/config.json").write_bytes(b"{}")
    assert "1_Pooling/config.json is damaged" in run_failing(capsys, 1, "verify", "padded")


def test_merge_keeps_nested_files() -> None:
    make_model()
    make_adapter(Path("a"), {"model.layers.0.self_attn.q_proj": (32, 32)})
    run_ok("merge", "a", "./m", "--out", "merged")
    assert nested_files(Path("merged")) == EXPECTED


def test_copy_selects_files_of_a_subfolder(capsys: Capture) -> None:
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


def test_export_excludes_files_by_pattern(capsys: Capture) -> None:
    make_model()
    write_files(Path("m"), {"README.md": b"card of the base", "LICENSE": b"text"})
    run_ok("save-init", "./m", "--out", "init")
    words = ("--exclude", "README.md", "--exclude", "*/*.json", "--out", "back")
    assert main(["export", "init", *words]) == 0
    excluded = ["README.md", "1_Pooling/config.json", "processor/image/preprocessor_config.json"]
    assert f"excluded: {', '.join(excluded)}\n" in capsys.readouterr().err
    assert nested_files(Path("back")) == {
        name: content for name, content in EXPECTED.items() if name not in excluded
    }
    assert Path("back/LICENSE").is_file()
    assert not Path("back/README.md").exists()
    manifest = json.loads(Path("back/prep-manifest.json").read_text())
    assert manifest["request"] == "prep export init --exclude README.md --exclude */*.json"
    run_ok("verify", "back", "./m")
    capsys.readouterr()
    run_ok("verify", "back", "--chain")
    assert "left out: " in capsys.readouterr().out


def test_exclude_is_one_pattern_in_python() -> None:
    make_model()
    prep.save_init("m", "init")
    result = prep.export("init", "back", exclude="*/*")
    assert nested_files(Path("back")) == {}
    assert prep.export("init", "back", exclude=["*/*"]).already_done
    assert result.plan.request == "prep export init --exclude */*"


def test_exclude_refuses_a_pattern_without_a_file(capsys: Capture) -> None:
    make_model()
    run_ok("save-init", "./m", "--out", "init")
    error = run_failing(capsys, 2, "export", "init", "--exclude", "*.safetensors", "--out", "x")
    assert "`--exclude '*.safetensors'` matches no file of init" in error
    assert not Path("x").exists()


def test_links_that_leave_the_folder_are_not_copied(capsys: Capture) -> None:
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


def test_large_subfolders_are_left_out(monkeypatch: MonkeyPatch, capsys: Capture) -> None:
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


def test_unread_weights_are_named(capsys: Capture) -> None:
    make_checkpoint(Path("m"), LLAMA)
    write_files(Path("m"), {"consolidated.safetensors": b"", "training_args.bin": b""})
    assert main(["save-init", "./m", "--out", "init"]) == 0
    assert "left out: consolidated.safetensors (other weights)\n" in capsys.readouterr().err


def test_nested_files_of_a_hub_model_are_copied() -> None:
    make_model()
    files = {path.relative_to("m").as_posix(): path.read_bytes() for path in Path("m").rglob("*.*")}
    files = {name: data for name, data in files.items() if name != "1_Pooling"}
    large = tuple(name for name in files if name.endswith(".safetensors"))
    with serve_hub({"o/m": FakeRepo(files, large=large)}) as hub:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        environment = inherited | hub.environment(Path.cwd() / "home")
        words = ("save-init", "o/m", "--out", "init")
        process = start_python(PREP_SCRIPT, *words, cwd=Path.cwd(), env=environment)
        _, error = process.communicate()
    assert process.returncode == 0, error
    assert_left_out(error.decode())
    assert nested_files(Path("init/hf")) == EXPECTED
    assert not list(Path("home").rglob("model.onnx"))


def test_nested_files_are_locked(capsys: Capture) -> None:
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


# Tensors in shards that the index assigns to another file, or does not name: ignored with a note, or refused


INDEX = "model.safetensors.index.json"
OVERLAY = "model-overlay.safetensors"
REPLACED = "model.layers.0.self_attn.q_proj.weight"


def make_overlay(folder: Path) -> dict[str, np.ndarray]:
    """Write a model whose index takes one tensor from an overlay, and names no draft head. Return its tensors."""
    tensors = make_checkpoint(folder, LLAMA)
    index = json.loads((folder / INDEX).read_text())
    shard = index["weight_map"][REPLACED]
    stored = load_file(folder / shard)
    earlier = {REPLACED: np.zeros_like(tensors[REPLACED]), "draft.fc": np.zeros(4, np.float32)}
    save_file(stored | earlier, folder / shard)
    save_file({REPLACED: tensors[REPLACED]}, folder / OVERLAY)
    index["weight_map"][REPLACED] = OVERLAY
    (folder / INDEX).write_text(json.dumps(index))
    return tensors


def folder_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_note(error: str, source: str, count: int) -> None:
    lines = [line for line in error.splitlines() if "not in its index" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"{count} tensors of {source} are ignored")


def test_tensors_outside_of_the_index_are_ignored(capsys: Capture) -> None:
    tensors = make_overlay(Path("m"))
    assert main(["save-init", "./m", "--out", "init"]) == 0
    error = capsys.readouterr().err
    assert_note(error, "./m", 2)
    assert f": {REPLACED}" in error
    assert ": draft.fc" in error
    assert_same(exported_tensors("init"), tensors)
    dropped = json.loads(Path("init/prep-manifest.json").read_text())["dropped"]
    assert {entry["rule"] for entry in dropped} == {"not in the index"}
    assert {entry["name"].partition(": ")[2] for entry in dropped} == {REPLACED, "draft.fc"}


@pytest.mark.parametrize("command", ["pad-vocab", "verify"])
def test_each_reader_notes_unindexed_tensors(command: str, capsys: Capture) -> None:
    tensors = make_overlay(Path("m"))
    make_checkpoint(Path("same"), LLAMA)
    words = {
        "pad-vocab": ["./m", "--size", "131", "--out", "padded"],
        "verify": ["./m", "./same"],
    }
    assert main([command, *words[command]]) == 0
    assert_note(capsys.readouterr().err, "./m", 2)
    if command == "pad-vocab":
        assert_same(read_tensors(Path("padded")), tensors)


def test_inspect_lists_unindexed_tensors(capsys: Capture) -> None:
    tensors = make_overlay(Path("m"))
    report = run_json(capsys, "inspect", "./m")
    assert {tensor["name"] for tensor in report["tensors"]} == tensors.keys()
    assert len(report["source"]["others"]) == 2
    assert all(line.endswith("is not in the index") for line in report["source"]["others"])


def test_strict_refuses_unindexed_tensors(capsys: Capture) -> None:
    make_overlay(Path("m"))
    for command in ("save-init", "pad-vocab"):
        error = run_failing(capsys, 1, command, "./m", "--strict", "--out", "init")
        assert "2 tensors of ./m are not in its index" in error
        assert REPLACED in error
        assert "remove" not in error
    assert not Path("init").exists()


def test_strict_accepts_unindexed_tensors_that_are_dropped(capsys: Capture) -> None:
    tensors = make_overlay(Path("m"))
    command = ("save-init", "./m", "--strict", "--drop", "draft*")
    error = run_failing(capsys, 1, *command, "--out", "init")
    assert "1 tensor of ./m is not in its index\n  why: " in error
    assert REPLACED in error
    assert "draft.fc" not in error
    run_ok(*command, "--drop", REPLACED, "--out", "init")
    assert_same(exported_tensors("init"), tensors)


def test_drop_may_name_an_unindexed_tensor() -> None:
    tensors = make_overlay(Path("m"))
    run_ok("save-init", "./m", "--drop", "draft*", "--out", "init")
    assert_same(exported_tensors("init"), tensors)


def test_index_of_torch_files_decides(capsys: Capture) -> None:
    tensors = make_checkpoint(Path("m"), LLAMA)
    Path("b").mkdir()
    shutil.copy("m/config.json", "b")
    rest = {name: value for name, value in tensors.items() if name != REPLACED}
    earlier = {REPLACED: np.zeros_like(tensors[REPLACED])}
    Path("b/weights.bin").write_bytes(make_torch_file(rest | earlier))
    Path("b/overlay.bin").write_bytes(make_torch_file({REPLACED: tensors[REPLACED]}))
    weight_map = dict.fromkeys(rest, "weights.bin") | {REPLACED: "overlay.bin"}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    Path("b/pytorch_model.bin.index.json").write_text(index)
    run_failing(capsys, 1, "save-init", "./b", "--strict", "--out", "init")
    assert main(["save-init", "./b", "--out", "init"]) == 0
    assert f"weights.bin: {REPLACED}" in capsys.readouterr().err
    assert_same(exported_tensors("init"), tensors)


def test_index_of_flax_files_decides(capsys: Capture) -> None:
    shutil.copytree(FLAX_LLAMA / "sharded", "f")
    index_path = Path("f/flax_model.msgpack.index.json")
    index = json.loads(index_path.read_text())
    shard = Path("f", sorted({*index["weight_map"].values()})[-1])
    content = shard.read_bytes()
    path, array = next(iter(decode_msgpack(content, "flax").items()))
    Path("f/overlay.msgpack").write_bytes(content)
    shard.write_bytes(content.replace(array.tobytes(), bytes(array.nbytes)))
    index["weight_map"]["/".join(path)] = "overlay.msgpack"
    index_path.write_text(json.dumps(index))
    run_failing(capsys, 1, "save-init", "./f", "--strict", "--out", "init")
    assert main(["save-init", "./f", "--out", "init"]) == 0
    assert "not in its index" in capsys.readouterr().err
    assert_same(exported_tensors("init"), read_tensors(FLAX_LLAMA / "hf"))


def test_index_in_a_bucket_decides(monkeypatch: MonkeyPatch, capsys: Capture) -> None:
    tensors = make_overlay(Path("m"))
    objects = {f"bucket/m/{name}": data for name, data in folder_files(Path("m")).items()}
    with use_objects(monkeypatch, objects):
        assert main(["save-init", "gs://bucket/m", "--out", "init"]) == 0
        assert_note(capsys.readouterr().err, "gs://bucket/m", 2)
        run_failing(capsys, 1, "save-init", "gs://bucket/m", "--strict", "--out", "other")
    assert_same(exported_tensors("init"), tensors)


def test_tensor_missing_from_its_indexed_file_is_an_error(capsys: Capture) -> None:
    make_overlay(Path("m"))
    index = json.loads(Path("m", INDEX).read_text())
    index["weight_map"]["draft.fc"] = OVERLAY
    Path("m", INDEX).write_text(json.dumps(index))
    error = run_failing(capsys, 1, "save-init", "./m", "--out", "init")
    assert "1 not in the file that the index names: `draft.fc`" in error
    assert f"get {OVERLAY} again" in error
