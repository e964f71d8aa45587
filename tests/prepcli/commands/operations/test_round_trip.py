"""Bit-exact round trips of tiny models through the conversions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.commands.cli.main import main
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import (
    GPT2,
    GPT_NEO,
    LLAMA,
    make_checkpoint,
    read_tensors,
    same_bits,
    write_checkpoint,
)


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


WIDE: dict[str, dict[str, Any]] = {  # sizes that all meshes divide
    "gpt2": {"n_embd": 64},
    "gpt_neo": {"hidden_size": 64},
    "llama": {"hidden_size": 64, "num_attention_heads": 4},
}
BASES: dict[str, dict[str, Any]] = {"gpt2": GPT2, "gpt_neo": GPT_NEO, "llama": LLAMA}
DTYPES = ("float32", "float16", "bfloat16")
FORMS = [(name, dtype, tied) for name in BASES for dtype in DTYPES for tied in (True, False)]
FAST_FORMS = [
    ("gpt2", "bfloat16", False),
    ("gpt_neo", "float16", True),
    ("llama", "bfloat16", True),
    ("llama", "float32", False),
]


def without_buffers(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Remove the buffers of old files, which only pad-vocab copies."""
    buffers = (".attn.bias", ".attention.bias", ".masked_bias", ".rotary_emb.inv_freq")
    return {name: value for name, value in tensors.items() if not name.endswith(buffers)}


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not same_bits(actual[name], expected[name])] == []


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


@pytest.mark.parametrize("init", ["zeros", "mean", "normal"])
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


def test_stored_tied_head_is_written_once():
    tensors = make_checkpoint(Path("m"))
    both = {**tensors, "lm_head.weight": tensors["transformer.wte.weight"]}
    write_checkpoint(Path("both"), json.loads(Path("m/config.json").read_text()), both)
    run_ok("pad-vocab", "./both")
    padded = read_tensors(Path("both-padded"))
    assert same_bits(padded["lm_head.weight"], padded["transformer.wte.weight"])
    run_ok("save-init", "both-padded")
    run_ok("export", "both-padded-init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def test_different_tied_head_needs_untie(capsys: pytest.CaptureFixture[str]):
    tensors = make_checkpoint(Path("m"))
    head = tensors["transformer.wte.weight"].copy()
    head[17, 3] += 1
    config = json.loads(Path("m/config.json").read_text())
    write_checkpoint(Path("both"), config, {**tensors, "lm_head.weight": head})
    for command in ("save-init", "pad-vocab"):
        assert main([command, "./both", "-q"]) == 1
        stderr = capsys.readouterr().err
        assert "lm_head.weight is not equal to transformer.wte.weight" in stderr
        assert "first difference in row 17" in stderr
        assert "--untie" in stderr
    assert not list(Path().glob("both-*[!l]"))
    run_ok("save-init", "./both", "--untie", "--restart")
    run_ok("export", "both-init", "--out", "back")
    assert_same(read_tensors(Path("back")), {**tensors, "lm_head.weight": head})
    assert json.loads(Path("back/config.json").read_text())["tie_word_embeddings"] is False


LAYOUTS = [["--no-scan"], ["--scan-axis", "1"], ["--mesh", "fsdp:2,mp:4,sp:2"]]
LAYOUT_CASES = [(base, options) for base in (GPT2, LLAMA) for options in LAYOUTS]
FAST_LAYOUT_CASES = [(LLAMA, LAYOUTS[0]), (GPT2, LAYOUTS[1]), (LLAMA, LAYOUTS[2])]


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


def test_output_does_not_depend_on_memory():
    make_checkpoint(Path("m"), LLAMA)
    run_ok("save-init", "./m", "--out", "a", "--memory", "512MiB")
    run_ok("save-init", "./m", "--out", "b", "--memory", "32MiB")
    files = sorted(p.relative_to("a") for p in Path("a").rglob("*") if p.is_file())
    assert files == sorted(p.relative_to("b") for p in Path("b").rglob("*") if p.is_file())
    assert [f for f in files if Path("a", f).read_bytes() != Path("b", f).read_bytes()] == []


def test_repeated_request_is_already_done(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("m"))
    run_ok("save-init", "./m")
    before = {p: p.stat().st_mtime_ns for p in Path("m-init").rglob("*")}
    capsys.readouterr()
    assert main(["save-init", "./m", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["already"] is True
    assert before == {p: p.stat().st_mtime_ns for p in Path("m-init").rglob("*")}


def test_other_request_needs_overwrite(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("m"))
    run_ok("save-init", "./m")
    assert main(["save-init", "./m", "--mesh", "1,2,1", "-q"]) == 1
    assert "m-init exists and is something else" in capsys.readouterr().err
    run_ok("save-init", "./m", "--mesh", "1,2,1", "--overwrite")
    assert json.loads(Path("m-init/prep-manifest.json").read_text())["mesh"] == "1,2,1"
    assert sorted(p.name for p in Path().iterdir()) == ["m", "m-init"]


def test_dry_run_equals_run_and_writes_nothing(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("m"))
    assert (
        main(
            [
                "save-init",
                "./m",
                "--mesh",
                "1,2,4",
                "--pad-vocab",
                "auto",
                "--dry-run",
                "--json",
                "-q",
            ]
        )
        == 0
    )
    planned = json.loads(capsys.readouterr().out)
    assert sorted(p.name for p in Path().iterdir()) == ["m"]
    assert main(["save-init", "./m", "--mesh", "1,2,4", "--pad-vocab", "auto", "--json", "-q"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert planned["plan_digest"] == report["plan_digest"]
    assert planned["accounting"] == report["accounting"]
    assert report["accounting"]["filled"] == [
        {"name": "transformer.wte.weight", "rows": [131, 132], "with": "zeros"}
    ]


def test_truncated_output_is_not_done(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("m"))
    run_ok("save-init", "./m")
    largest = max(Path("m-init/d").iterdir(), key=lambda p: p.stat().st_size)
    largest.write_bytes(b"")
    assert main(["save-init", "./m", "-q"]) == 1
    assert "but its files are damaged" in capsys.readouterr().err
    run_ok("save-init", "./m", "--overwrite")
    run_ok("verify", "m-init")


def test_output_with_broken_manifest_is_overwritten():
    make_checkpoint(Path("m"))
    run_ok("save-init", "./m")
    Path("m-init/prep-manifest.json").write_text("{")
    assert main(["save-init", "./m", "-q"]) == 1
    run_ok("save-init", "./m", "--overwrite")
    run_ok("verify", "m-init")


@pytest.mark.parametrize("lost", ["manifest.ocdbt", "_METADATA", "hf/config.json"])
def test_output_with_a_missing_metadata_file_is_damaged(lost: str):
    make_checkpoint(Path("m"))
    run_ok("save-init", "./m")
    Path("m-init", lost).unlink()
    assert main(["save-init", "./m", "-q"]) == 1
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


def test_verify_compares_stored_tied_head(capsys: pytest.CaptureFixture[str]):
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


def test_source_behind_links_is_not_overwritten(capsys: pytest.CaptureFixture[str]):
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
