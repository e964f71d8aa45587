"""Bit-exact round trips through the conversions, with rules of leaves and existing outputs, and `prep roundtrip`."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.commands.operations import roundtrip as module
from prepcli.core.errors import (
    FAILED,
    USAGE,
    OutputExistsError,
    PrepError,
)
from prepcli.formats.manifest import record_file
from tests.helpers.damage import flip_bit, largest_file
from tests.helpers.manifests import changed_manifest
from tests.helpers.quantized_folders import make_quantized
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
from tests.helpers.training_folder import write_tokenizer

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
    before = json.loads(Path("m/config.json").read_text())
    assert json.loads(Path("back/config.json").read_text()) == {**before, "vocab_size": 131}
    tokenizer = Path("back/tokenizer_config.json").read_bytes()
    assert tokenizer == Path("m/tokenizer_config.json").read_bytes()
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
    assert read_manifest("m-init")["mesh"] == "1,2,1"
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
    weight_map = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    Path("m/model.safetensors.index.json").write_text(index)
    run_ok("pad-vocab", "./m")
    written = json.loads(Path("m-padded/model.safetensors.index.json").read_text())
    assert written["weight_map"] == weight_map


def test_auto_padding_never_removes_rows():
    make_checkpoint(Path("m"))
    run_ok("pad-vocab", "./m", "--multiple", "100")
    run_ok(
        "save-init", "m-padded", "--mesh", "1,1,8", "--pad-vocab", "auto", "--rule", "heads=none"
    )
    assert read_manifest("m-padded-init")["vocab"] == {"true": 131, "padded": 200}


def test_reshard_keeps_mesh_and_rules_by_default():
    make_checkpoint(Path("m"))
    run_ok("save-init", "./m", "--mesh", "1,8,1", "--rule", "mlp=none")
    run_ok("reshard", "m-init", "--no-scan", "--out", "unstacked")
    manifest = read_manifest("unstacked")
    assert (manifest["mesh"], manifest["rules"], manifest["scan"]) == ("1,8,1", ["mlp=none"], False)


def test_verify_compares_stored_tied_head(capsys: Capture):
    tensors = make_checkpoint(Path("m"))
    head = tensors["transformer.wte.weight"] + 1
    config = json.loads(Path("m/config.json").read_text())
    write_checkpoint(Path("both"), config, {**tensors, "lm_head.weight": head})
    error = run_failing(capsys, 1, "verify", "./both", "./m")
    assert "lm_head.weight is tied but not equal to transformer.wte.weight" in error


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


def read_manifest(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "prep-manifest.json").read_text())


def test_padding_fits_rules_of_vocabulary_leaves():
    make_checkpoint(Path("m"), LLAMA)
    rule = ("--pad-vocab", "auto", "--rule", r"re:^(embed\.tokens|head\.weight)$=fsdp+mp,none")
    run_ok("save-init", "m", "--mesh", "1,3,4", *rule, "--rule", "embed=none", "--out", "i")
    assert read_manifest("i")["vocab"] == {"true": 131, "padded": 132}
    run_ok("save-init", "m", "--mesh", "1,2,4", *rule, "--out", "j")
    assert read_manifest("j")["vocab"] == {"true": 131, "padded": 136}


def test_rule_without_leaf_is_an_error(capsys: Capture):
    make_checkpoint(Path("m"), LLAMA)
    options = ("save-init", "m", "--mesh", "1,1,1")
    assert main([*options, "--rule", r"re:^layers\.atn\.q\.weight$=mp,none,none", "-q"]) == USAGE
    lines = error_lines(capsys, *options, "--rule", r"re:^layers\.atn\.q\.weight$=mp,none,none")
    assert lines[0] == r"error: `re:^layers\.atn\.q\.weight$=mp,none,none` matches no leaf"
    assert "did you mean `layers.attn.q.weight`?" in lines[-1]


def test_load_params_places_shards_by_stored_rules():
    tensors = make_checkpoint(Path("m"), LLAMA, vocab_size=136)
    init = prep.save_init("m", out="init", mesh="1,2,4", rules=[QUERY_RULE])
    params = prep.load_params(init.path, mesh="1,2,4")
    q = params["layers"]["attn"]["q"]["weight"]
    assert q.addressable_shards[0].data.shape == (3, 8, 2, 8)
    up = params["layers"]["mlp"]["up"]["weight"]
    assert np.array_equal(np.asarray(up)[0], tensors["model.layers.0.mlp.up_proj.weight"])


# Behaviour shared by the converting commands


@pytest.mark.parametrize("command", ["save-init", "pad-vocab"])
def test_conversion_warns_of_a_config_that_cannot_be_computed(command: str, capsys: Capture):
    make_checkpoint(Path("odd"), LLAMA, clip_qkv=8.0)
    words = (command, "./odd", "--out", "out", "--dry-run")
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
    [
        ("llama", {"hidden_act": "tanh"}, "activation `tanh` is not supported"),
        ("gpt_neox", {"rotary_pct": 0.2}, "3 elements of a head are to be rotated"),
    ],
)
def test_warning_has_the_reason_that_computations_refuse(
    family: str, changes: dict[str, Any], reason: str, capsys: Capture
):
    make_checkpoint(Path("odd"), FAMILY_CONFIGS.get(family, LLAMA), **changes)
    warnings = run_json(capsys, "save-init", "./odd", "--out", "out")["warnings"]
    (warning,) = [text for text in warnings if "not trained" in text]
    assert reason in warning
    assert reason in run_failing(capsys, 1, "plan", "out", "--mesh", "1,1,1")


def test_save_init_does_not_warn_about_a_supported_config(capsys: Capture):
    make_checkpoint(Path("plain"), LLAMA)
    words = ("save-init", "./plain", "--out", "out", "--dry-run")
    assert main([*words]) == 0
    assert "not trained" not in capsys.readouterr().err
    assert run_json(capsys, *words)["not_computed"] is None


def test_sources_older_than_1970_are_converted(tmp_path: Path) -> None:
    tensors = make_checkpoint(tmp_path / "m", GPT_NEO)
    seconds = datetime(1901, 1, 1, tzinfo=UTC).timestamp()
    for path in (tmp_path / "m").iterdir():
        os.utime(path, (seconds, seconds))
    run_ok("save-init", "./m", "--out", "init")
    run_ok("verify", "init", "./m")
    assert_same(exported_tensors("init"), tensors)


# `prep roundtrip` certifies that every way there and back keeps every bit. safetensors and xxhash are the judges.


@pytest.fixture
def model() -> Path:
    """Write a model `m` with a tokenizer to the working folder."""
    make_checkpoint(Path("m"), LLAMA)
    write_tokenizer(Path("m"))
    return Path("m")


def wrap_export(monkeypatch: MonkeyPatch, after: Callable[[Path], object]) -> None:
    """Call `after` with the folder of each finished export in the layout of Hugging Face."""

    def export(checkpoint: str, out: Path, **options: Any) -> prep.Conversion:
        result = prep.export(checkpoint, out, **options)
        if not {"layout", "format"} & options.keys():
            after(out)
        return result

    monkeypatch.setitem(module.CONVERSIONS, "export", export)


@pytest.mark.slow
def test_every_way_ends_in_the_tensors_of_the_model(model: Path, monkeypatch: MonkeyPatch):
    ends: list[dict[str, np.ndarray]] = []
    wrap_export(monkeypatch, lambda folder: ends.append(read_tensors(folder)))
    certificate = prep.roundtrip("m")
    assert certificate
    assert {way.status for way in certificate.ways} == {"equal"}
    expected = read_tensors(model)
    assert len(ends) == len(certificate.ways) == len(module.WAYS)
    for tensors in ends:
        assert tensors.keys() == expected.keys()
        assert all(same_bits(tensors[name], expected[name]) for name in expected)


def test_certificate_has_counts_and_digests_of_the_model(model: Path):
    prep.roundtrip("m", layout=["init", "easylm"])
    content = json.loads(Path("m.roundtrip.json").read_text())
    tensors = read_tensors(model)
    state = xxhash.xxh3_128()
    for name, array in sorted(tensors.items()):
        digest = xxhash.xxh3_128_hexdigest(array.tobytes())
        record = {"dtype": str(array.dtype), "shape": list(array.shape)}
        record["digests"] = [[0, len(array), digest]]
        line = json.dumps([name, record], sort_keys=True, separators=(",", ":"))
        state.update(f"{line}\n".encode())
    assert content["versions"]["prep"] == prep.__version__
    for way in content["ways"]:
        assert way["tensors"] == len(tensors)
        assert way["nbytes"] == sum(array.nbytes for array in tensors.values())
        assert way["digest"] == state.hexdigest()
    assert content["ways"][1]["commands"] == ["export --layout easylm", "save-init", "export"]


def test_model_in_half_precision_comes_back():
    make_checkpoint(Path("m"), GPT_NEO, dtype="bfloat16")
    certificate = prep.roundtrip("m", layout=["init", "no-scan", "pad", "hf-flax"])
    assert certificate
    assert [way.status for way in certificate.ways][:3] == ["equal"] * 3


def test_way_that_a_model_does_not_have_is_not_available():
    # MaxText divides queries by the square root of the 8 elements of a head.
    make_checkpoint(Path("m"), LLAMA, num_attention_heads=4, num_key_value_heads=2)
    certificate = prep.roundtrip("m", layout=["init", "maxtext", "maxtext-unscanned"])
    assert certificate
    assert [way.status for way in certificate.ways] == ["equal", *["not available"] * 2]
    assert "the scale of the layout changes" in certificate.ways[1].reason


def test_unwritable_folder_of_the_certificate_is_named(model: Path, monkeypatch: MonkeyPatch):
    def fail(*words: Any, **options: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkdtemp", fail)
    with pytest.raises(PrepError, match=r"out\.json"):
        prep.roundtrip("m", "out.json", layout=["init"])


def test_changed_bit_is_a_difference(model: Path, monkeypatch: MonkeyPatch, capsys: Capture):
    wrap_export(monkeypatch, lambda folder: flip_bit(next(folder.glob("*.safetensors")), -1))
    certificate = prep.roundtrip("m", layout=["init"])
    assert not certificate
    (way,) = certificate.ways
    assert way.status == "different"
    assert " of " in way.reason
    message = run_failing(capsys, FAILED, "roundtrip", "m", "--layout", "init")
    assert "m is not the same after the way init" in message


def test_changed_config_is_a_difference(model: Path, monkeypatch: MonkeyPatch):
    def change_config(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 1.0}))
        prep.verify(folder, accept=["config.json"])

    wrap_export(monkeypatch, change_config)
    (way,) = prep.roundtrip("m", layout=["init"]).ways
    assert way.status == "different"
    assert way.reason == "another config `rms_norm_eps`"


def test_lost_and_added_files_are_differences(model: Path, monkeypatch: MonkeyPatch):
    def change_files(folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        added = folder / "chat_template.jinja"
        added.write_text("{{ messages }}")
        with changed_manifest(folder) as manifest:
            del manifest["files"]["tokenizer.json"]
            manifest["files"][added.name] = record_file(added)

    wrap_export(monkeypatch, change_files)
    (way,) = prep.roundtrip("m", layout=["init"]).ways
    assert way.status == "different"
    assert "another tokenizer.json" in way.reason
    assert "another chat_template.jinja" in way.reason


def test_model_that_cannot_be_read_is_an_error(model: Path, monkeypatch: MonkeyPatch):
    def fail(checkpoint: str, out: Path, **options: Any) -> prep.Conversion:
        raise PrepError("m cannot be read") from OSError("input/output error")

    monkeypatch.setitem(module.CONVERSIONS, "pad-vocab", fail)
    with pytest.raises(PrepError, match=r"^m "):
        prep.roundtrip("m", layout=["init", "pad"])
    assert not Path("m.roundtrip.json").exists()


def test_folder_in_place_of_the_certificate_is_refused_early(model: Path, monkeypatch: MonkeyPatch):
    Path("certificates").mkdir()
    monkeypatch.setattr(module, "CONVERSIONS", {})
    with pytest.raises(PrepError, match="certificates is not a file"):
        prep.roundtrip("m", "certificates", overwrite=True)


def test_model_without_any_way_is_an_error():
    make_checkpoint(Path("m"), GPT_NEO)
    with pytest.raises(PrepError, match="m has no way back"):
        prep.roundtrip("m", layout=["easylm"])
    assert not Path("m.roundtrip.json").exists()


def test_another_certificate_needs_overwrite(model: Path):
    prep.roundtrip("m", layout=["init"])
    before = Path("m.roundtrip.json").read_bytes()
    prep.roundtrip("m", layout=["init"])
    with pytest.raises(OutputExistsError, match="already exists"):
        prep.roundtrip("m", layout=["no-scan"])
    assert Path("m.roundtrip.json").read_bytes() == before
    prep.roundtrip("m", layout=["no-scan"], overwrite=True)
    assert Path("m.roundtrip.json").read_bytes() != before


def test_command_prints_a_table_and_json(model: Path, capsys: Capture):
    report = run_json(capsys, "roundtrip", "m", "--layout", "init", "--layout", "compress")
    assert [way["status"] for way in report["ways"]] == ["equal", "equal"]
    assert report["path"] == "m.roundtrip.json"
    message = run_failing(capsys, USAGE, "roundtrip", "m", "--layout", "easylmm")
    assert "did you mean `easylm`?" in message


def test_quantised_model_has_no_way_back():
    make_quantized(Path("q"), "fp8")
    with pytest.raises(PrepError, match="quanti"):
        prep.roundtrip("q")
