"""Bad input: one message (what, why, hint), exit code 1 or 2, no output, and an unchanged source."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prepcli.commands.cli.main import main
from tests.helpers.pickle_builder import encode_call, encode_text, make_pickle, make_zip_file
from tests.helpers.run_cli import MonkeyPatch, run_failing, run_failing_unchanged, run_json, run_ok
from tests.helpers.tiny_checkpoints import (
    GPT_NEO,
    LLAMA,
    checkpoint_tensors,
    make_checkpoint,
    write_checkpoint,
)


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-cache"))


def edit_config(folder: str, **changes: object) -> None:
    path = Path(folder, "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


NO_NAME = "not a folder here, not an alias, and a hub id has the form owner/name"
NO_PATH = "it looks like a path because it begins with `./`"
# Checkpoint that does not exist, beside a folder `llama-13b`, and the hint
MISSING = [
    ("gpt-neo-1.3b", "did you mean `gpt-neo-1.3B`?"),
    ("./mistral", "folders here: llama-13b"),
    ("./lama-13b", "did you mean `./llama-13b`?"),
    ("./lama-13b/", "did you mean `./llama-13b`?"),
    ("./models/lama", "`prep models` lists the models that can be named without a path"),
]


@pytest.mark.parametrize(("name", "hint"), MISSING)
def test_missing_checkpoint_gets_a_suggestion(capsys, name: str, hint: str):
    make_checkpoint(Path("llama-13b"), LLAMA)
    is_path = name.startswith("./")
    what = f"`{name}` does not exist" if is_path else f"no checkpoint called `{name}`"
    why = NO_PATH if is_path else NO_NAME
    expected = [f"error: {what}", f"  why: {why}", f" hint: {hint}"]
    assert run_failing_unchanged(capsys, "save-init", name) == (2, expected)


def test_folder_without_checkpoint_lists_its_files(capsys):
    Path("x").mkdir()
    Path("x/notes.txt").write_text("hello")
    code, lines = run_failing_unchanged(capsys, "save-init", "./x")
    assert (code, lines[0]) == (1, "error: `./x` holds no checkpoint")
    assert "looked for *.safetensors" in lines[1]
    assert "found notes.txt" in lines[1]


def test_truncated_shard_is_named(capsys):
    make_checkpoint(Path("m"), files=3)
    shard = sorted(Path("m").glob("*.safetensors"))[1]
    size = shard.stat().st_size
    os.truncate(shard, size - 1000)
    code, lines = run_failing_unchanged(capsys, "save-init", "./m")
    assert (code, lines[0]) == (1, f"error: {shard.name} is cut short")
    assert lines[1] == f"  why: its header promises {size:,} bytes, the file has {size - 1000:,}"
    assert "--force-download" in lines[2]


def test_missing_shard_is_named(capsys):
    make_checkpoint(Path("m"), files=3)
    shards = sorted(Path("m").glob("*.safetensors"))
    shards[-1].unlink()
    code, lines = run_failing_unchanged(capsys, "save-init", "./m")
    assert (code, lines[0]) == (1, f"error: 1 of {len(shards)} files of m is missing")
    assert shards[-1].name in lines[1]


def test_unknown_family_error_names_the_unsupported_layers(capsys):
    make_checkpoint(Path("m"))
    edit_config("m", model_type="zamba2")
    code, lines = run_failing_unchanged(capsys, "save-init", "./m", "--no-verbatim")
    assert (code, lines[0]) == (1, "error: model_type `zamba2` is not supported")
    mechanism = "state-space layers other than those of the supported families"
    assert lines[1] == f"  why: it needs {mechanism}, which prep does not support"


def test_unexpected_tensors_are_all_named(capsys):
    make_checkpoint(Path("m"), LLAMA, attention_bias=True)
    edit_config("m", attention_bias=False)
    code, lines = run_failing_unchanged(capsys, "save-init", "./m")
    assert (code, lines[0]) == (1, "error: 12 tensors of ./m are not part of family llama")
    for layer in range(3):
        for part, rows in (("q", 32), ("k", 16), ("v", 16), ("o", 32)):
            assert f"model.layers.{layer}.self_attn.{part}_proj.bias [{rows}]" in lines[1]
    assert lines[2] == (
        " hint: use the config.json of the model with its biases (`attention_bias`, `mlp_bias`);"
        " `--verbatim` keeps the names of the file"
    )
    assert main(["save-init", "./m", "--drop", "model.layers.*.self_attn.*.bias", "-q"]) == 0


def test_missing_tensors_are_all_named(capsys):
    tensors = make_checkpoint(Path("m"), LLAMA)
    gone = [name for name in tensors if name.endswith("mlp.up_proj.weight")]
    rest = {name: value for name, value in tensors.items() if name not in gone}
    write_checkpoint(Path("less"), json.loads(Path("m/config.json").read_text()), rest)
    code, lines = run_failing_unchanged(capsys, "save-init", "./less")
    assert (code, lines[0]) == (1, "error: 3 tensors of ./less are missing")
    assert all(f"{name} [48, 32]" in lines[1] for name in gone)


def test_first_tensors_of_wrong_shape_are_named(capsys):
    make_checkpoint(Path("m"), LLAMA)
    edit_config("m", intermediate_size=64)
    code, lines = run_failing_unchanged(capsys, "save-init", "./m")
    assert (code, lines[0]) == (1, "error: 9 tensors of ./m do not match config.json")
    assert (
        "model.layers.0.mlp.gate_proj.weight has shape [48, 32], expected [64, 32] (mlp 64 x embed 32)"
        in lines[1]
    )
    assert re.search(r" and [2-5] more$", lines[1])
    assert lines[2] == (
        " hint: check that config.json and the weights belong to the same model;"
        " `--verbatim` keeps the names of the file"
    )


def test_all_tensor_mismatches_are_in_one_error(capsys):
    tensors = make_checkpoint(Path("m"), LLAMA)
    tensors["model.norm.extra"] = tensors.pop("model.norm.weight")
    write_checkpoint(Path("odd"), {**LLAMA, "intermediate_size": 64}, tensors)
    code, lines = run_failing_unchanged(capsys, "pad-vocab", "./odd")
    assert (code, lines[0]) == (1, "error: ./odd does not match family llama")
    assert "missing: model.norm.weight [32]" in lines[1]
    assert "unexpected: model.norm.extra [32]" in lines[1]
    assert "wrong shape: " in lines[1]


# Options of `prep save-init` for a vocabulary of 131, and the error
INVALID_OPTIONS = [
    (
        "--mesh 1,1,4",
        "error: vocabulary 131 cannot be split over mp 4\n  why: 131 mod 4 = 3\n"
        " hint: `prep pad-vocab ./m --multiple 4` (to 132), or `--pad-vocab auto`",
    ),
    (
        "--mesh 1,64",
        "error: `--mesh 1,64` has 2 axes\n"
        "  why: it takes dp,fsdp,mp, or names: `fsdp:64,mp:4,sp:2`\n hint: did you mean `1,64,1`?",
    ),
    ("--mesh 1,-1,1", "1,-1,1"),
    ("--memory 8MiB", "error: `--memory 8MiB` is below the minimum"),
    ("--memory 8MiB", " hint: `--memory 32MiB` or more"),
    ("--drop '*.typo'", "error: `--drop '*.typo'` drops nothing of ./m"),
    (
        "--drop transformer.wte.weight",
        "error: `--drop transformer.wte.weight` drops nothing of ./m",
    ),
]


def test_invalid_options_are_usage_errors(capsys):
    make_checkpoint(Path("m"))
    for words, message in INVALID_OPTIONS:
        code, lines = run_failing_unchanged(capsys, "save-init", "./m", *shlex.split(words))
        assert code == 2
        assert message in "\n".join(lines)


def test_full_disk_is_found_before_writing(capsys, monkeypatch):
    make_checkpoint(Path("m"))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    code, lines = run_failing_unchanged(capsys, "save-init", "./m")
    assert (code, lines[0]) == (1, "error: not enough room for m-init")
    assert "1000 bytes free" in lines[1]
    assert "--out" in lines[2]


def test_unfinished_run_of_other_request_needs_restart(capsys):
    make_checkpoint(Path("m"))
    Path("m-init.partial/.prep").mkdir(parents=True)
    Path("m-init.partial/.prep/run.json").write_text(
        json.dumps({"request": "prep save-init ./m --mesh 1,2,1"})
    )
    Path("m-init.partial/.prep/journal.0").write_text("a journal of another version")
    code, lines = run_failing_unchanged(capsys, "save-init", "./m")
    assert (code, lines[0]) == (1, "error: m-init.partial belongs to another run")
    assert "`prep save-init ./m --mesh 1,2,1`" in lines[1]
    assert lines[2] == " hint: `--restart` deletes it"
    assert main(["save-init", "./m", "--restart", "-q"]) == 0


def test_offline_without_cached_model_is_an_error(capsys):
    code, lines = run_failing_unchanged(capsys, "save-init", "meta-llama/Llama-2-13b-hf")
    assert (code, lines[0]) == (1, "error: cannot read meta-llama/Llama-2-13b-hf")
    assert "not in the cache" in lines[1]


def test_pickle_with_code_is_rejected_and_not_run(capsys):
    Path("m").mkdir()
    Path("m/config.json").write_text(json.dumps(GPT_NEO))
    pickled = make_pickle(encode_call("os.system", encode_text("touch pwned")))
    Path("m/pytorch_model.bin").write_bytes(make_zip_file(pickled))
    code, lines = run_failing_unchanged(capsys, "save-init", "./m")
    assert code == 1
    assert lines[0] == "error: pytorch_model.bin refers to `os.system`"
    assert "prep runs no code of a file" in lines[1]
    assert not Path("pwned").exists()


Entries = dict[str, dict[str, Any]]


def with_each(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Entries], Entries]:
    """Return a function that changes each entry of a header."""
    return lambda header: {name: entry | change(entry) for name, entry in header.items()}


SPOILED_HEADERS: list[Callable[[Entries], Entries]] = [
    lambda header: {**header, "x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}},
    with_each(lambda entry: {"data_offsets": [offset + 8 for offset in entry["data_offsets"]]}),
    with_each(lambda entry: {"shape": [2**62, 2**62]}),
    with_each(lambda entry: {"shape": [size + 1 for size in entry["shape"]]}),
    with_each(lambda entry: {"dtype": "F128"}),
    with_each(lambda entry: {"data_offsets": entry["data_offsets"][::-1]}),
]


def test_inconsistent_safetensors_header_is_an_error(capsys):
    make_checkpoint(Path("m"), files=1)
    path = Path("m/model.safetensors")
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    for spoil in SPOILED_HEADERS:
        text = json.dumps(spoil(header)).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
        for command in ("pad-vocab", "save-init", "verify", "inspect"):
            code, lines = run_failing_unchanged(capsys, command, "./m")
            assert code in (1, 2)
            assert "model.safetensors" in " ".join(lines)


INVALID_FIELDS: list[dict[str, object]] = [
    {"vocab_size": "many"},
    {"vocab_size": -1},
    {"vocab_size": 0},
    {"vocab_size": 10**15},
    {"num_heads": 0},
    {"num_heads": 5},
    {"num_layers": 10**9},
    {"num_layers": None},
    {"hidden_size": 2.5},
    {"hidden_size": [32]},
    {"true_vocab_size": 999},
    {"model_type": None},
    {"model_type": ["gpt_neo"]},
]


def test_invalid_config_is_an_error(capsys):
    make_checkpoint(Path("m"))
    config = Path("m/config.json").read_bytes()
    for changes in INVALID_FIELDS:
        edit_config("m", **changes)
        code, lines = run_failing_unchanged(capsys, "save-init", "./m", "--no-verbatim")
        assert code in (1, 2), changes
        assert "bug in prep" not in lines[0], changes
        Path("m/config.json").write_bytes(config)


def test_invalid_manifest_is_an_error(capsys):
    make_checkpoint(Path("m"))
    assert main(["save-init", "./m", "-q"]) == 0
    capsys.readouterr()
    path = Path("m-init/prep-manifest.json")
    manifest = json.loads(path.read_text())
    for spoiled in (
        b"",
        b"[]",
        b'{"format": 99}',
        *(_without(manifest, key) for key in ("config", "tensors", "prefixed", "scan", "tied")),
    ):
        path.write_bytes(spoiled)
        for command in ("export", "verify", "reshard"):
            code, lines = run_failing_unchanged(capsys, command, "m-init")
            assert code in (1, 2)
            assert "bug in prep" not in lines[0]


def _without(manifest: dict, key: str) -> bytes:
    return json.dumps({k: v for k, v in manifest.items() if k != key}).encode()


def test_read_only_source_is_converted():
    make_checkpoint(Path("m"), LLAMA)
    for path in [*Path("m").iterdir(), Path("m")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert main(["save-init", "./m", "-q"]) == 0
    Path("m").chmod(0o755)


def test_tensor_name_with_path_separators_is_rejected(capsys):
    tensors = checkpoint_tensors(GPT_NEO, "float32", True, False)
    tensors["../../evil"] = tensors["transformer.ln_f.bias"]
    tensors["a\nb"] = tensors["transformer.ln_f.bias"]
    write_checkpoint(Path("m"), GPT_NEO, tensors)
    code, lines = run_failing_unchanged(capsys, "save-init", "./m")
    assert code == 1
    assert len(lines) == 3
    assert "../../evil [32]" in lines[1]


def test_config_option_is_rejected_with_a_manifest(capsys):
    make_checkpoint(Path("m"))
    assert main(["save-init", "./m", "--out", "init", "-q"]) == 0
    capsys.readouterr()
    for command in (["verify"], ["export"], ["reshard"], ["generate", "--tokens", "1"]):
        code, lines = run_failing_unchanged(
            capsys, command[0], "init", *command[1:], "--config", "m"
        )
        assert (code, lines[0]) == (2, "error: `--config` has no effect for init")
    assert main(["verify", "init", "./m", "--config", "m/config.json", "-q"]) == 0
    capsys.readouterr()
    code, lines = run_failing_unchanged(capsys, "verify", "init", "init", "--config", "m")
    assert (code, lines[0]) == (2, "error: `--config` has no effect for init and init")


def test_config_with_infinity_is_converted_and_written_back(capsys):
    """Python writes it into the config.json of Falcon-H1: `time_step_limit` is [0.0, Infinity]."""
    make_checkpoint(Path("m"), LLAMA, time_step_limit=[0.0, math.inf])
    config = Path("m/config.json").read_bytes()
    assert b"Infinity" in config
    run_ok("save-init", "m", "--out", "init")
    run_ok("export", "init", "--out", "back")
    assert json.loads(Path("back/config.json").read_bytes()) == json.loads(config)
    for checkpoint in ("m", "init", "back"):
        assert run_json(capsys, "inspect", checkpoint)["ok"]


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "prep-manifest.json"]
)
def test_deeply_nested_json_is_rejected(capsys, name: str):
    make_checkpoint(Path("m"), LLAMA)
    path = Path("m", name)
    if name == "prep-manifest.json":
        run_ok("save-init", "m", "--out", "init")
        path = Path("init", name)
    deep = b'{"a":' * 800 + b"1" + b"}" * 800
    content = path.read_bytes()
    path.write_bytes(content.replace(b"{", b'{"deep": ' + deep + b",", 1))
    err = run_failing(capsys, 1, "inspect", str(path.parent))
    assert "nested" in err
    path.write_bytes(deep)
    err = run_failing(capsys, 1, "inspect", str(path.parent))
    assert "nested" in err


@pytest.mark.parametrize(
    "name", ["o" * 247, "é" * 123, "o" * 250, "o" * 300, "/".join(["o" * 200] * 30)]
)
def test_long_name_of_an_output_is_written_or_refused(capsys, name: str):
    """The suffix `.partial` makes a name longer than a file system allows."""
    make_checkpoint(Path("m"), LLAMA)
    if len(os.fsencode(name)) <= 247:
        run_ok("save-init", "m", "--out", name)
        return
    code, lines = run_failing_unchanged(capsys, "save-init", "m", "--out", name)
    assert code in (1, 2)
    assert "is too long" in lines[0] or "File name too long" in lines[1]
    assert "247 bytes" in lines[-1] or "at most 255 bytes" in lines[-1]
    assert max(map(len, lines)) < 200


def test_folder_of_several_checkpoints_is_an_error(capsys):
    """The folder has one Orbax item beside another checkpoint. Neither may be chosen silently."""
    Path("models").mkdir()
    make_checkpoint(Path("models/m"), LLAMA)
    run_ok("save-init", "models/m", "--out", "models/m-init")
    capsys.readouterr()
    expected = [
        "error: `models` holds 2 checkpoints",
        "  why: a command reads one",
        " hint: name one: `models/m`, `models/m-init`",
    ]
    for command in ("export", "verify", "inspect", "reshard"):
        assert run_failing_unchanged(capsys, command, "models") == (1, expected)


def test_only_item_of_a_folder_is_still_read(capsys):
    make_checkpoint(Path("m"), LLAMA)
    run_ok("save-init", "m", "--out", "models/m-init")
    Path("models/hf").mkdir()
    Path("models/hf/config.json").write_bytes(Path("m/config.json").read_bytes())
    Path("models/unfinished.partial").mkdir()
    Path("models/unfinished.partial/model.safetensors").touch()
    assert run_json(capsys, "inspect", "models")["source"]["tensors"] > 0
