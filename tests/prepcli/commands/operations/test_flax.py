"""Reading and writing Flax msgpack and EasyLM streams: golden files of both libraries, and bit-exact round trips."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.cli.main import main
from prepcli.formats import msgpack_layout
from tests.helpers.golden_flax import FILES, LLAMA, MODELS, decode_msgpack
from tests.helpers.llama_trees import expected_output, read_output
from tests.helpers.run_cli import (
    Capture,
    MonkeyPatch,
    exported_tensors,
    run_failing,
    run_json,
    run_ok,
)
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import (
    FAMILY_CONFIGS,
    GPT_NEO,
    assert_same,
    make_checkpoint,
    read_tensors,
    same_bits,
    write_checkpoint,
)
from tests.helpers.tiny_checkpoints import LLAMA as LLAMA_CONFIG

BASES = {
    "gpt_neo": GPT_NEO,
    "llama": LLAMA_CONFIG | {"num_attention_heads": 4, "num_key_value_heads": 2},
}
FLAX_FOLDERS = [*(model / "flax" for model in MODELS), LLAMA / "sharded"]
OTHER_FILES = [name.removeprefix("llama/") for name in FILES if name.count("/") == 1]


def inspected_source(capsys: Capture, *words: str) -> dict[str, Any]:
    return run_json(capsys, "inspect", *words)["source"]


# Golden files


@pytest.mark.parametrize(
    "folder",
    slow_except(FLAX_FOLDERS, [LLAMA / "flax", LLAMA / "sharded"]),
    ids=[f"{path.parent.name}-{path.name}" for path in FLAX_FOLDERS],
)
def test_flax_files_of_transformers_are_read(capsys: Capture, folder: Path):
    expected = inspected_source(capsys, str(folder.parent / "hf"))["parameters"]
    assert inspected_source(capsys, str(folder))["parameters"] == expected > 0
    run_ok("save-init", str(folder), "--out", "init")
    run_ok("verify", "init", str(folder.parent / "hf"))
    run_ok("verify", str(folder), str(folder.parent / "hf"))
    assert_same(exported_tensors("init"), read_tensors(folder.parent / "hf"))


FAST_FILES = ["boxed.msgpack", "stacked_1", "streaming_train_state"]


@pytest.mark.parametrize("name", slow_except(OTHER_FILES, FAST_FILES))
def test_files_of_flax_and_easylm_are_read(capsys: Capture, name: str):
    words = ("--config", str(LLAMA / "hf"), "--mesh", "1,2,1", "--out", "init")
    run_ok("save-init", str(LLAMA / name), *words)
    run_ok("verify", "init", str(LLAMA / "hf"))
    assert_same(exported_tensors("init"), read_tensors(LLAMA / "hf"))
    expected = inspected_source(capsys, str(LLAMA / "hf"))["parameters"]
    source = inspected_source(capsys, str(LLAMA / name), "--config", str(LLAMA / "hf"))
    assert (source["family"], source["parameters"]) == ("llama", expected)
    assert main(["inspect", str(LLAMA / name)]) == 0
    assert "unknown family (no config.json: `--config PATH`)" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["trainstate", "trainstate_params", "params", "flax_params"])
@pytest.mark.parametrize(
    "name",
    slow_except(
        ["streaming_params", "streaming_train_state", "flax_params.msgpack"], ["streaming_params"]
    ),
)
def test_easylm_part_prefix_must_match_the_file(capsys: Capture, part: str, name: str):
    right = {"streaming_params": ("params",), "flax_params.msgpack": ("flax_params",)}
    config = ("--config", str(LLAMA / "hf/config.json"))
    args = ("save-init", f"{part}::{LLAMA / name}", *config, "--out", "init")
    if part in right.get(name, ("trainstate", "trainstate_params")):
        run_ok(*args)
        run_ok("verify", "init", str(LLAMA / "hf"))
        assert_same(exported_tensors("init"), read_tensors(LLAMA / "hf"))
        return
    suggestions = re.findall(r"`(\w+)::(.*)`", run_failing(capsys, 1, *args))
    assert suggestions == [
        (
            right.get(name, ("params" if part == "flax_params" else "trainstate_params",))[0],
            str(LLAMA / name),
        )
    ]


def test_dropped_training_state_is_listed(capsys: Capture):
    name = str(LLAMA / "streaming_train_state")
    words = ("--config", str(LLAMA / "hf"), "--dry-run")
    report = run_json(capsys, "save-init", f"trainstate::{name}", *words)
    dropped = [(entry["name"], entry["rule"]) for entry in report["accounting"]["dropped"]]
    assert dropped == [("opt_state", "optimizer state"), ("step", "training state")]
    report = run_json(capsys, "save-init", f"trainstate_params::{name}", *words)
    assert report["accounting"]["dropped"] == []


@pytest.mark.parametrize(
    "model", slow_except(MODELS, MODELS[::4]), ids=[model.name for model in MODELS]
)
def test_flax_export_equals_file_of_transformers(model: Path):
    run_ok("save-init", str(model / "hf"), "--out", "init")
    run_ok("export", "init", "--layout", "hf-flax", "--out", "out")
    assert (
        Path("out/flax_model.msgpack").read_bytes()
        == (model / "flax/flax_model.msgpack").read_bytes()
    )
    run_ok("verify", "out")
    run_ok("verify", "out", str(model / "hf"))


def test_sharded_flax_export_equals_files_of_transformers():
    run_ok("save-init", str(LLAMA / "hf"), "--out", "init")
    run_ok("export", "init", "--layout", "hf-flax", "--shard-size", "8KB", "--out", "out")
    expected = {path.name: path.read_bytes() for path in (LLAMA / "sharded").glob("flax_model-*")}
    assert {path.name: path.read_bytes() for path in Path("out").glob("flax_model-*")} == expected
    index = "flax_model.msgpack.index.json"
    actual_index, expected_index = (
        json.loads((folder / index).read_bytes()) for folder in (Path("out"), LLAMA / "sharded")
    )
    assert actual_index == expected_index
    run_ok("verify", "out", str(LLAMA / "hf"))


EASYLM_CASES = [  # layout, file, memory, and size of a piece
    ("easylm", "streaming_params", "512MiB", None),
    ("easylm-scanned", "stacked_0", "512MiB", None),
    ("easylm", "streaming_pieces", "32MiB", 600),
]


@pytest.mark.parametrize(("layout", "file", "memory", "piece_nbytes"), EASYLM_CASES)
def test_easylm_export_equals_file_of_easylm(
    layout: str, file: str, memory: str, piece_nbytes: int | None, monkeypatch: MonkeyPatch
):
    if piece_nbytes:
        monkeypatch.setattr(msgpack_layout, "MAX_PIECE_NBYTES", piece_nbytes)
    run_ok("save-init", str(LLAMA / "hf"), "--out", "init")
    run_ok("export", "init", "--layout", layout, "--memory", memory, "--out", "out")
    assert Path("out/streaming_params").read_bytes() == (LLAMA / file).read_bytes()
    run_ok("verify", "out")
    run_ok("verify", "params::out/streaming_params", str(LLAMA / "hf"))


# Round trips


FORMS = [
    (family, layout, tied, dtype)
    for family, layout in (("gpt_neo", "hf-flax"), ("llama", "hf-flax"), ("llama", "easylm"))
    for tied in (True, False)
    for dtype in ("float32", "bfloat16")
]
FAST_FORMS = [
    ("gpt_neo", "hf-flax", True, "bfloat16"),
    ("llama", "hf-flax", True, "float32"),
    ("llama", "easylm", False, "bfloat16"),
]


@pytest.mark.parametrize(("family", "layout", "tied", "dtype"), slow_except(FORMS, FAST_FORMS))
def test_flax_export_round_trips(family: str, layout: str, tied: bool, dtype: str):
    tensors = make_checkpoint(Path("m"), BASES[family], dtype, tied, legacy=True)
    run_ok("save-init", "./m", "--pad-vocab", "8", "--mesh", "1,2,2", "--out", "init")
    run_ok("export", "init", "--layout", layout, "--out", "there")
    run_ok("save-init", "there", "--no-scan", "--out", "again")
    run_ok("export", "again", "--out", "back")
    buffers = (".attention.bias", ".masked_bias", ".rotary_emb.inv_freq")
    assert_same(
        read_tensors(Path("back")), {n: v for n, v in tensors.items() if not n.endswith(buffers)}
    )
    assert json.loads(Path("back/config.json").read_text()) == json.loads(
        Path("m/config.json").read_text()
    )
    assert (
        Path("there/tokenizer_config.json").read_bytes()
        == Path("m/tokenizer_config.json").read_bytes()
    )


def test_tied_head_is_stored_for_flax_llama():
    tensors = make_checkpoint(Path("m"), LLAMA_CONFIG, tied=True)
    run_ok("export", "./m", "--layout", "hf-flax", "--out", "there")
    actual = decode_msgpack(Path("there/flax_model.msgpack").read_bytes(), "flax")
    assert same_bits(actual["lm_head", "kernel"], tensors["model.embed_tokens.weight"].T)
    run_ok("verify", "there", "./m")
    make_checkpoint(Path("n"), GPT_NEO, tied=True)
    run_ok("export", "./n", "--layout", "hf-flax", "--out", "neo")
    assert ("lm_head", "kernel") not in decode_msgpack(
        Path("neo/flax_model.msgpack").read_bytes(), "flax"
    )


@pytest.mark.slow
def test_flax_export_keeps_names_without_prefix():
    tensors = make_checkpoint(Path("with"), GPT_NEO)
    bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    write_checkpoint(Path("m"), {**GPT_NEO, "architectures": ["GPTNeoModel"]}, bare)
    run_ok("export", "./m", "--layout", "hf-flax", "--out", "there")
    assert ("wte", "embedding") in decode_msgpack(
        Path("there/flax_model.msgpack").read_bytes(), "flax"
    )
    run_ok("save-init", "there", "--out", "init")
    run_ok("export", "init", "--out", "back")
    assert_same(read_tensors(Path("back")), bare)


BIASES = [  # layout, family, fields of the config, and the error
    (
        "easylm",
        "llama",
        {"attention_bias": True},
        "has no place for model.layers.0.self_attn.k_proj.bias",
    ),
    ("hf-flax", "llama", {"mlp_bias": True}, "has no place for model.layers.0.mlp.down_proj.bias"),
    ("hf-flax", "opt", {"enable_bias": False}, "needs model.decoder.layers.0.fc1.bias"),
]


@pytest.mark.parametrize(("layout", "family", "changes", "why"), BIASES)
def test_layout_rejects_unsupported_biases(
    capsys: Capture, layout: str, family: str, changes: dict[str, Any], why: str
):
    make_checkpoint(Path("m"), {**FAMILY_CONFIGS, "llama": LLAMA_CONFIG}[family], **changes)
    assert f"the layout {why}" in run_failing(capsys, 1, "export", "./m", "--layout", layout)


# Errors


# Options of `prep export`, and a part of the error
REFUSED_OPTIONS = [
    (["--layout", "keras"], "the layouts are hf, hf-flax, easylm"),
    (["--layout", "hf-flax", "--format", "stream"], "or use `--layout easylm`"),
    (["--format", "msgpack"], "or use `--layout hf-flax`"),
    (["--layout", "easylm", "--format", "safetensors"], "or use `--layout hf`"),
    (["--layout", "easylm", "--shard-size", "1MB"], "`--shard-size` is not supported for streams"),
]


@pytest.mark.parametrize(("options", "advice"), REFUSED_OPTIONS)
def test_unsupported_options_are_rejected(options: list[str], advice: str, capsys: Capture):
    make_checkpoint(Path("m"), LLAMA_CONFIG)
    assert advice in run_failing(capsys, 2, "export", "./m", *options)


def test_layout_unsupported_by_family_is_rejected(capsys: Capture):
    make_checkpoint(Path("m"), GPT_NEO)
    assert "supported: hf, hf-flax" in run_failing(capsys, 2, "export", "./m", "--layout", "easylm")


def test_flax_file_without_config_needs_config_option(capsys: Capture):
    shutil.copy(LLAMA / "streaming_params", ".")
    stderr = run_failing(capsys, 1, "save-init", "params::streaming_params", "--no-verbatim")
    assert "has no config.json" in stderr
    assert "`--config FOLDER`" in stderr
    assert "gone" in run_failing(capsys, 1, "save-init", "streaming_params", "--config", "gone")
    shutil.copy(LLAMA / "hf/config.json", ".")
    run_ok("save-init", "params::./streaming_params", "--out", "init")


def test_path_after_an_easylm_prefix_must_exist(capsys: Capture):
    assert "`gone` does not exist" in run_failing(capsys, 2, "save-init", "params::gone")


def test_config_of_other_model_is_rejected(capsys: Capture):
    config = json.loads((LLAMA / "hf/config.json").read_text())
    for key, value, why in (
        ("hidden_size", 32, "its shape is [53, 16], its config implies [53, 32]"),
        ("num_hidden_layers", 1, "transformer.h.1.ffn_norm.kernel [16]"),
        ("num_hidden_layers", 3, "model.layers.2."),
        ("num_hidden_layers", 50_000, "has 50,000 layers"),
        ("model_type", "gpt_neo", "has no known layout"),
    ):
        Path("config.json").write_text(json.dumps({**config, key: value}))
        args = ("save-init", str(LLAMA / "streaming_params"), "--config", "config.json")
        assert why in run_failing(capsys, 1, *args), (key, value)


def test_folder_with_several_streams_needs_a_choice(capsys: Capture):
    shutil.copy(LLAMA / "hf/config.json", ".")
    for name in ("streaming_params_10", "streaming_params_20"):
        shutil.copy(LLAMA / "streaming_params", name)
    stderr = run_failing(capsys, 1, "save-init", "./", "--out", "../init")
    assert "holds 2 EasyLM streams" in stderr
    assert "`params::streaming_params_20`" in stderr
    Path("streaming_params_10").unlink()
    run_ok("save-init", "./", "--out", "../init")
    shutil.copy(LLAMA / "streaming_train_state", ".")
    run_ok("save-init", "./", "--out", "../state")


def test_flax_index_is_checked_against_its_files(capsys: Capture):
    shutil.copytree(LLAMA / "sharded", "m")
    Path("m/flax_model-00009-of-00009.msgpack").write_bytes(b"left over from an earlier save")
    run_ok("save-init", "./m", "--out", "init")
    Path("m/flax_model-00002-of-00003.msgpack").write_bytes(
        Path("m/flax_model-00001-of-00003.msgpack").read_bytes()
    )
    assert "lack tensors that the index names" in run_failing(
        capsys, 1, "save-init", "./m", "--out", "x"
    )
    Path("m/flax_model-00002-of-00003.msgpack").unlink()
    assert "1 of 3 files of m are missing" in run_failing(
        capsys, 1, "save-init", "./m", "--out", "x"
    ).replace(" is ", " are ")


def test_output_does_not_replace_source_file(capsys: Capture):
    shutil.copy(LLAMA / "streaming_params", ".")
    shutil.copy(LLAMA / "hf/config.json", ".")
    run_ok("save-init", "streaming_params")
    run_ok("verify", "streaming_params-init", str(LLAMA / "hf"))
    assert_same(exported_tensors("streaming_params-init"), read_tensors(LLAMA / "hf"))
    assert "is the source" in run_failing(
        capsys, 2, "save-init", "streaming_params", "--out", "streaming_params"
    )
    words = ("save-init", "./streaming_params", "--out", f"../{Path().absolute().name}")
    assert "is inside the output" in run_failing(capsys, 2, *words, "--overwrite")


@pytest.mark.parametrize(
    ("layout", "file"),
    slow_except(
        [("hf-flax", "flax_model.msgpack"), ("easylm", "streaming_params")],
        [("hf-flax", "flax_model.msgpack")],
    ),
)
def test_single_file_is_checked_against_its_manifest(capsys: Capture, layout: str, file: str):
    run_ok("export", str(LLAMA / "hf"), "--layout", layout, "--out", "output")
    path = Path("output", file)
    run_ok("save-init", str(path), "--out", "init")
    run_ok("verify", str(path))
    data = path.read_bytes()
    for position in (-1, 1):  # a byte of a tensor, and one of the header
        damaged = bytearray(data)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        run_failing(capsys, 1, "save-init", str(path), "--out", "damaged")
    path.write_bytes(data)
    Path("output/config.json").write_bytes(Path("output/config.json").read_bytes() + b" ")
    stderr = run_failing(capsys, 1, "save-init", str(path), "--out", "damaged")
    assert "config.json is damaged" in stderr


def test_file_that_a_manifest_does_not_list_is_read():
    run_ok("export", str(LLAMA / "hf"), "--layout", "hf-flax", "--out", "output")
    Path("output/flax_model.msgpack").rename("output/mine.msgpack")
    run_ok("save-init", "output/mine.msgpack", "--out", "init")
    run_ok("verify", "init", str(LLAMA / "hf"))
    assert_same(exported_tensors("init"), read_tensors(LLAMA / "hf"))


def test_inspect_lists_tensors_of_flax_files(capsys: Capture):
    assert main(["inspect", str(LLAMA / "pieces.msgpack"), "--stats", "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["source"]["format"] == "flax"
    assert {t["name"] for t in report["tensors"]} >= {
        "params.lm_head.kernel",
        "params.transformer.h.1.attention.wq.kernel",
    }
    assert main(["inspect", str(LLAMA / "streaming_train_state")]) == 0
    stdout = capsys.readouterr().out
    assert "EasyLM stream, 1 file" in stdout
    assert "step is 0" in stdout


@pytest.mark.parametrize("layout", slow_except(["hf-flax", "easylm"], ["hf-flax"]))
def test_flax_export_casts(layout: str):
    make_checkpoint(Path("m"), LLAMA_CONFIG)
    run_ok("export", "./m", "--dtype", "bfloat16", "--out", "cast")
    run_ok("export", "./m", "--dtype", "bfloat16", "--layout", layout, "--out", "there")
    run_ok("verify", "there", "cast")
    expected = expected_output(layout, read_tensors(Path("cast")), LLAMA_CONFIG)
    assert_same(read_output(layout, Path("there")), expected)
