"""Bit-exact round trips of tiny models through the conversions, with rules of leaves and existing outputs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.commands.operations.checkpoint_options import source_line
from prepcli.core.errors import USAGE
from prepcli.sources.source import SourceTensor
from tests.helpers.damage import largest_file
from tests.helpers.run_cli import (
    Capture,
    MonkeyPatch,
    error_lines,
    exported_tensors,
    run_failing,
    run_json,
    run_ok,
)
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import (
    FAMILY_CONFIGS,
    GPT2,
    GPT_NEO,
    LLAMA,
    assert_same,
    make_checkpoint,
    read_tensors,
    same_bits,
    write_checkpoint,
)

WIDE: dict[str, dict[str, Any]] = {  # sizes that all meshes divide
    "gpt2": {"n_embd": 64},
    "gpt_neo": {"hidden_size": 64},
    "llama": {"hidden_size": 64, "num_attention_heads": 4},
}
BASES: dict[str, dict[str, Any]] = {"gpt2": GPT2, "gpt_neo": GPT_NEO, "llama": LLAMA}
DTYPES = ("float32", "float16", "bfloat16")
FORMS = [(name, dtype, tied) for name in BASES for dtype in DTYPES for tied in (True, False)]
FAST_FORMS = [("gpt_neo", "float16", True)]


def without_buffers(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Remove the buffers of old files, which only pad-vocab copies."""
    buffers = (".attn.bias", ".attention.bias", ".masked_bias", ".rotary_emb.inv_freq")
    return {name: value for name, value in tensors.items() if not name.endswith(buffers)}


@pytest.mark.parametrize(("name", "dtype", "tied"), slow_except(FORMS, FAST_FORMS))
def test_pad_init_reshard_export_changes_no_bit(name: str, dtype: str, tied: bool):
    tensors = make_checkpoint(Path("m"), BASES[name], dtype, tied, legacy=True, **WIDE[name])
    run_ok("pad-vocab", "./m", "--multiple", "8")
    run_ok("save-init", "m-padded", "--memory", "32MiB")
    previous = "m-padded-init"
    for number, mesh in enumerate(["1,8,1", "1,4,2", "1,64,4"]):
        run_ok("reshard", previous, "--mesh", mesh, "--out", f"r{number}")
        previous = f"r{number}"
    run_ok("export", previous, "--out", "back")
    assert_same(read_tensors(Path("back")), without_buffers(tensors))
    before, after = (
        json.loads(Path(folder, "config.json").read_text()) for folder in ("m", "back")
    )
    assert after == {**before, "vocab_size": 131}
    assert (
        Path("back/tokenizer_config.json").read_bytes()
        == Path("m/tokenizer_config.json").read_bytes()
    )
    run_ok("verify", "back", "./m")
    run_ok("verify", previous, "m-padded")


@pytest.mark.parametrize("init", slow_except(["zeros", "mean", "normal"], ["normal"]))
def test_pad_vocab_only_adds_rows(init: str):
    tensors = make_checkpoint(Path("m"), LLAMA, "bfloat16", legacy=True)
    run_ok("pad-vocab", "./m", "--multiple", "8", "--init", init)
    actual = read_tensors(Path("m-padded"))
    padded = {"model.embed_tokens.weight", "lm_head.weight"}
    assert_same(
        {n: v for n, v in actual.items() if n not in padded},
        {n: v for n, v in tensors.items() if n not in padded},
    )
    for name in padded:
        assert actual[name].shape == (136, 32)
        assert same_bits(actual[name][:131], tensors[name])
        mean = tensors[name].astype(np.float64).mean(axis=0).astype(tensors[name].dtype)
        if init == "zeros":
            assert not actual[name][131:].astype(np.float32).any()
        elif init == "mean":
            assert all(same_bits(row, mean) for row in actual[name][131:])
        else:
            assert 0.01 < actual[name][131:].astype(np.float64).std() < 0.03
    config = json.loads(Path("m-padded/config.json").read_text())
    assert (config["vocab_size"], config["true_vocab_size"]) == (136, 131)


@pytest.mark.slow
def test_padding_twice_equals_padding_once():
    make_checkpoint(Path("m"))
    run_ok("pad-vocab", "./m", "--multiple", "8", "--out", "eight")
    run_ok("pad-vocab", "eight", "--multiple", "8", "--out", "again")
    run_ok("pad-vocab", "eight", "--multiple", "128", "--out", "wide")
    run_ok("pad-vocab", "./m", "--multiple", "128", "--out", "once")
    assert_same(read_tensors(Path("again")), read_tensors(Path("eight")))
    assert_same(read_tensors(Path("wide")), read_tensors(Path("once")))
    assert read_tensors(Path("wide"))["transformer.wte.weight"].shape == (256, 32)


def test_mean_padding_uses_true_rows():
    tensors = make_checkpoint(Path("m"))
    run_ok("pad-vocab", "./m", "--multiple", "8", "--out", "eight")
    run_ok("pad-vocab", "eight", "--multiple", "64", "--init", "mean", "--out", "wide")
    table = read_tensors(Path("wide"))["transformer.wte.weight"]
    mean = tensors["transformer.wte.weight"].astype(np.float64).mean(axis=0).astype(np.float32)
    assert not table[131:136].any()
    assert all(same_bits(row, mean) for row in table[136:])


def test_names_without_prefix_round_trip():
    tensors = make_checkpoint(Path("m"))
    bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    write_checkpoint(Path("bare"), json.loads(Path("m/config.json").read_text()), bare)
    run_ok("save-init", "./bare")
    run_ok("export", "bare-init", "--out", "back")
    assert_same(read_tensors(Path("back")), bare)


LAYOUTS = [["--no-scan"], ["--scan-axis", "1"], ["--mesh", "fsdp:2,mp:4,sp:2"]]
LAYOUT_CASES = [(base, options) for base in (GPT2, LLAMA) for options in LAYOUTS]
FAST_LAYOUT_CASES = [(LLAMA, LAYOUTS[0]), (GPT2, LAYOUTS[1])]


@pytest.mark.parametrize(("base", "options"), slow_except(LAYOUT_CASES, FAST_LAYOUT_CASES))
def test_other_tree_layouts_round_trip(base: dict[str, Any], options: list[str]):
    tensors = make_checkpoint(Path("m"), base, "float16")
    run_ok("save-init", "./m", "--pad-vocab", "8", *options)
    run_ok("verify", "m-init")
    run_ok("export", "m-init")
    assert_same(read_tensors(Path("m-hf")), tensors)


def test_export_keeps_padding_and_shards_by_size():
    tensors = make_checkpoint(Path("m"), LLAMA)
    run_ok("save-init", "./m", "--pad-vocab", "8")
    run_ok("export", "m-init", "--keep-padding", "--shard-size", "40KB", "--out", "back")
    actual = read_tensors(Path("back"))
    assert actual["lm_head.weight"].shape == (136, 32)
    assert same_bits(actual["lm_head.weight"][:131], tensors["lm_head.weight"])
    assert len(list(Path("back").glob("*.safetensors"))) > 3
    assert json.loads(Path("back/config.json").read_text())["true_vocab_size"] == 131


def test_repeated_request_is_already_done(capsys: Capture):
    make_checkpoint(Path("m"))
    run_ok("save-init", "./m")
    before = {p: p.stat().st_mtime_ns for p in Path("m-init").rglob("*")}
    capsys.readouterr()
    assert main(["save-init", "./m", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["already"] is True
    assert before == {p: p.stat().st_mtime_ns for p in Path("m-init").rglob("*")}


def test_other_request_needs_overwrite(capsys: Capture):
    make_checkpoint(Path("m"))
    run_ok("save-init", "./m")
    assert main(["save-init", "./m", "--mesh", "1,2,1", "-q"]) == 1
    assert "m-init exists and is something else" in capsys.readouterr().err
    run_ok("save-init", "./m", "--mesh", "1,2,1", "--overwrite")
    assert json.loads(Path("m-init/prep-manifest.json").read_text())["mesh"] == "1,2,1"
    assert sorted(p.name for p in Path().iterdir()) == ["m", "m-init"]


def test_dry_run_equals_run_and_writes_nothing(capsys: Capture):
    make_checkpoint(Path("m"))
    words = ("save-init", "./m", "--mesh", "1,2,4", "--pad-vocab", "auto", "-q")
    planned = run_json(capsys, *words, "--dry-run")
    assert sorted(p.name for p in Path().iterdir()) == ["m"]
    report = run_json(capsys, *words)
    assert planned["plan_digest"] == report["plan_digest"]
    assert planned["accounting"] == report["accounting"]
    assert report["accounting"]["filled"] == [
        {"name": "transformer.wte.weight", "rows": [131, 132], "with": "zeros"}
    ]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda init: largest_file(init / "d").write_bytes(b""),
    "manifest": lambda init: (init / "prep-manifest.json").write_text("{"),
    "database": lambda init: (init / "manifest.ocdbt").unlink(),
    "tree": lambda init: (init / "_METADATA").unlink(),
    "config": lambda init: (init / "hf/config.json").unlink(),
}


@pytest.mark.parametrize("damage", slow_except(DAMAGES, ["config"]))
def test_damaged_output_is_not_done(damage: str, capsys: Capture):
    make_checkpoint(Path("m"))
    run_ok("save-init", "./m")
    DAMAGES[damage](Path("m-init"))
    error = run_failing(capsys, 1, "save-init", "./m")
    assert "but its files are damaged" in error or damage == "manifest"
    run_ok("save-init", "./m", "--overwrite")
    run_ok("verify", "m-init")


def test_changed_tokenizer_is_another_request():
    make_checkpoint(Path("m"))
    run_ok("save-init", "./m")
    Path("m/tokenizer_config.json").write_text('{"model_max_length": 128}')
    assert main(["save-init", "./m", "-q"]) == 1
    run_ok("save-init", "./m", "--overwrite")
    assert "128" in Path("m-init/hf/tokenizer_config.json").read_text()


def test_numbered_single_file_keeps_its_index():
    tensors = make_checkpoint(Path("m"), files=1)
    Path("m/model.safetensors").rename("m/model-00001-of-00001.safetensors")
    index = {
        "metadata": {},
        "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors"),
    }
    Path("m/model.safetensors.index.json").write_text(json.dumps(index))
    run_ok("pad-vocab", "./m")
    written = json.loads(Path("m-padded/model.safetensors.index.json").read_text())
    assert written["weight_map"] == index["weight_map"]


def test_auto_padding_never_removes_rows():
    make_checkpoint(Path("m"))
    run_ok("pad-vocab", "./m", "--multiple", "100")
    run_ok(
        "save-init", "m-padded", "--mesh", "1,1,8", "--pad-vocab", "auto", "--rule", "heads=none"
    )
    assert json.loads(Path("m-padded-init/prep-manifest.json").read_text())["vocab"] == {
        "true": 131,
        "padded": 200,
    }


def test_reshard_keeps_mesh_and_rules_by_default():
    make_checkpoint(Path("m"))
    run_ok("save-init", "./m", "--mesh", "1,8,1", "--rule", "mlp=none")
    run_ok("reshard", "m-init", "--no-scan", "--out", "unstacked")
    manifest = json.loads(Path("unstacked/prep-manifest.json").read_text())
    assert (manifest["mesh"], manifest["rules"], manifest["scan"]) == ("1,8,1", ["mlp=none"], False)


def test_verify_compares_stored_tied_head(capsys: Capture):
    tensors = make_checkpoint(Path("m"))
    head = tensors["transformer.wte.weight"] + 1
    write_checkpoint(
        Path("both"),
        json.loads(Path("m/config.json").read_text()),
        {**tensors, "lm_head.weight": head},
    )
    assert main(["verify", "./both", "./m", "-q"]) == 1
    assert (
        "lm_head.weight is tied but not equal to transformer.wte.weight" in capsys.readouterr().err
    )


def test_source_behind_links_is_not_overwritten(capsys: Capture):
    make_checkpoint(Path("weights"))
    Path("links").mkdir()
    for path in Path("weights").iterdir():
        if path.name == "config.json" or ".safetensors" in path.name:
            Path("links", path.name).symlink_to(path.resolve())
    assert main(["pad-vocab", "./links", "--out", "weights", "--overwrite", "-q"]) == 2
    assert "the output weights is the source" in capsys.readouterr().err
    run_ok("pad-vocab", "./links", "--out", "padded")


def test_dangling_link_is_not_replaced():
    make_checkpoint(Path("m"))
    Path("m-init").symlink_to("/nowhere/at/all")
    assert main(["save-init", "./m", "-q"]) == 1
    assert Path("m-init").is_symlink()


# Conversions with rules of leaves and presets: chunks, manifests, padding, shard maps and loaded parameters


QUERY_RULE = r"re:^layers\.attn\.(q|k|v)\.weight$=none,fsdp,mp"
# a query weight of 1 MiB
WIDE_LLAMA: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 1, "num_key_value_heads": 8}
QUERY, OUTPUT = "params.layers.attn.q.weight", "params.layers.attn.o.weight"


def read_manifest(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "prep-manifest.json").read_text())


def chunk_of(folder: str, leaf: str) -> list[int]:
    """Return the chunk shape of a leaf."""
    return read_manifest(folder)["leaves"][leaf]["chunk"]


@pytest.mark.slow
def test_chunks_follow_rules_of_leaves_in_every_layout(capsys: Capture):
    tensors = make_checkpoint(Path("m"), LLAMA, **WIDE_LLAMA)
    pad, mesh = ("--pad-vocab", "auto"), ("--mesh", "1,2,4")
    run_ok("save-init", "m", *mesh, *pad, "--rule", QUERY_RULE, "--out", "init")
    assert (chunk_of("init", QUERY), chunk_of("init", OUTPUT)) == ([1, 8, 32, 128], [1, 256, 2, 64])
    assert read_manifest("init")["rules"] == [QUERY_RULE]
    run_ok("reshard", "init", "--no-scan", "--mesh", "1,4,2", "--out", "unstacked")
    assert chunk_of("unstacked", QUERY.replace("layers", "layers.0")) == [8, 16, 256]
    run_ok(
        "reshard",
        "unstacked",
        "--scan",
        "--scan-axis",
        "1",
        *mesh,
        "--rule",
        "auto",
        "--out",
        "by-size",
    )
    assert (chunk_of("by-size", QUERY), chunk_of("by-size", OUTPUT)) == (
        [8, 1, 32, 128],
        [128, 1, 8, 32],
    )
    run_ok("verify", "by-size")
    run_ok("export", "by-size", "--out", "back")
    assert all(
        same_bits(array, tensors[name]) for name, array in read_tensors(Path("back")).items()
    )
    shards = run_json(capsys, "inspect", "init", "--shards", "attn.q.weight")["shards"]
    assert (shards["spec"], shards["shard"]) == ("P(None, None, fsdp, mp)", [1, 8, 32, 128])


def test_padding_fits_rules_of_vocabulary_leaves():
    make_checkpoint(Path("m"), LLAMA)
    rule = r"re:^(embed\.tokens|head\.weight)$=fsdp+mp,none"
    run_ok(
        "save-init",
        "m",
        "--mesh",
        "1,3,4",
        "--pad-vocab",
        "auto",
        "--rule",
        rule,
        "--rule",
        "embed=none",
        "--out",
        "i",
    )
    assert read_manifest("i")["vocab"] == {"true": 131, "padded": 132}
    run_ok("save-init", "m", "--mesh", "1,2,4", "--pad-vocab", "auto", "--rule", rule, "--out", "j")
    assert read_manifest("j")["vocab"] == {"true": 131, "padded": 136}


def test_rule_without_leaf_is_an_error(capsys: Capture):
    make_checkpoint(Path("m"), LLAMA)
    options = ("save-init", "m", "--mesh", "1,1,1")
    assert main([*options, "--rule", r"re:^layers\.atn\.q\.weight$=mp,none,none", "-q"]) == USAGE
    lines = error_lines(capsys, *options, "--rule", r"re:^layers\.atn\.q\.weight$=mp,none,none")
    assert lines[0] == r"error: `re:^layers\.atn\.q\.weight$=mp,none,none` matches no leaf"
    assert "did you mean `layers.attn.q.weight`?" in lines[-1]


@pytest.mark.parametrize(
    "rules", slow_except([[QUERY_RULE], ["flaxlm:2,2"], ["auto"]], [[QUERY_RULE]])
)
def test_load_params_places_shards_by_stored_rules(rules: list[str]):
    tensors = make_checkpoint(Path("m"), LLAMA, vocab_size=136)
    init = prep.save_init("m", out="init", mesh="1,2,4", rules=rules)
    params = prep.load_params(init.path, mesh="1,2,4")
    q = params["layers"]["attn"]["q"]["weight"]
    expected = {"auto": (3, 4, 4, 8), "flaxlm:2,2": (3, 2, 4, 16)}.get(rules[0], (3, 8, 2, 8))
    assert q.addressable_shards[0].data.shape == expected
    up = params["layers"]["mlp"]["up"]["weight"]
    assert np.array_equal(np.asarray(up)[0], tensors["model.layers.0.mlp.up_proj.weight"])


# Behaviour shared by the converting commands


class CountingTensors(tuple[SourceTensor, ...]):
    """Tuple of tensors that counts its iterations."""

    num_iterations = 0

    def __iter__(self) -> Any:
        CountingTensors.num_iterations += 1
        return super().__iter__()


def test_source_line_lists_dtypes_of_large_tensors():
    biases = [SourceTensor(f"bias{i}", "float32", (1,), ()) for i in range(50)]
    weights = [
        SourceTensor(f"w{i}", dtype, (8, 8), ()) for i, dtype in enumerate(("bfloat16", "float16"))
    ]
    source: Any = SimpleNamespace(
        display_name="o/m", family=SimpleNamespace(name="llama"), files=("a", "b"),
        tensors=CountingTensors([*weights, *biases]),
        tower_tensors=(), state_tensors=(), extra_entries=(), quantization={}, wrapper=None,
    )  # fmt: skip
    assert source_line(source) == "o/m  llama  52 tensors  456 bytes bfloat16, float16  2 files"
    assert CountingTensors.num_iterations < 10


@pytest.mark.parametrize("command", ["save-init", "pad-vocab"])
def test_conversion_warns_of_a_config_that_cannot_be_computed(
    command: str, tmp_path: Path, capsys: Capture
):
    make_checkpoint(tmp_path / "odd", LLAMA, clip_qkv=8.0)
    words = (command, str(tmp_path / "odd"), "--out", str(tmp_path / "out"), "--dry-run")
    assert main([*words]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "not trained" in line]
    assert "`clip_qkv` is not supported" in line
    report = run_json(capsys, *words)
    assert "clip_qkv" in report["not_computed"]
    assert report["warnings"] == [line.removeprefix("warning: ")]


@pytest.mark.parametrize(
    ("fields", "next_command"),
    [
        ({}, "prep train RECIPE --set model.path=out"),
        ({"clip_qkv": 8.0}, "prep reshard out --mesh DP,FSDP,MP"),
    ],
)
def test_save_init_is_followed_by_training_if_possible(
    fields: dict[str, Any],
    next_command: str,
    tmp_path: Path,
    monkeypatch: MonkeyPatch,
    capsys: Capture,
):
    make_checkpoint(tmp_path / "m", LLAMA, **fields)
    monkeypatch.chdir(tmp_path)
    assert run_json(capsys, "save-init", "./m", "--out", "out")["next"] == next_command


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    slow_except(
        [
            ("llama", {"hidden_act": "tanh"}, "activation `tanh` is not supported"),
            ("llama", {"hidden_act": "laplace"}, "activation `laplace` is not supported"),
            ("gpt_neox", {"rotary_pct": 0.2}, "3 elements of a head are to be rotated"),
            (
                "qwen2",
                {"layer_types": ["sliding_attention"] * 3, "sliding_window": None},
                "there is no sliding_window",
            ),
        ],
        [
            ("llama", {"hidden_act": "tanh"}, "activation `tanh` is not supported"),
            ("gpt_neox", {"rotary_pct": 0.2}, "3 elements of a head are to be rotated"),
        ],
    ),
)
def test_warning_has_the_reason_that_computations_refuse(
    family: str, changes: dict[str, Any], reason: str, tmp_path: Path, capsys: Capture
):
    config = FAMILY_CONFIGS.get(family, LLAMA) | (
        {"use_sliding_window": True} if family == "qwen2" else {}
    )
    make_checkpoint(tmp_path / "odd", config, **changes)
    warnings = run_json(capsys, "save-init", str(tmp_path / "odd"), "--out", str(tmp_path / "out"))[
        "warnings"
    ]
    (warning,) = [text for text in warnings if "not trained" in text]
    assert reason in warning
    assert reason in run_failing(capsys, 1, "plan", str(tmp_path / "out"), "--mesh", "1,1,1")


def test_save_init_does_not_warn_about_a_supported_config(tmp_path: Path, capsys: Capture):
    make_checkpoint(tmp_path / "plain", LLAMA)
    words = ("save-init", str(tmp_path / "plain"), "--out", str(tmp_path / "out"), "--dry-run")
    assert main([*words]) == 0
    assert "not trained" not in capsys.readouterr().err
    assert run_json(capsys, *words)["not_computed"] is None


@pytest.mark.parametrize("year", slow_except([1901, 1960], [1901]))
def test_sources_older_than_1970_are_converted(year: int, tmp_path: Path) -> None:
    tensors = make_checkpoint(tmp_path / "m", GPT_NEO)
    seconds = datetime(year, 1, 1, tzinfo=UTC).timestamp()
    for path in (tmp_path / "m").iterdir():
        os.utime(path, (seconds, seconds))
    run_ok("save-init", "./m", "--out", "init")
    run_ok("verify", "init", "./m")
    assert_same(exported_tensors("init"), tensors)
