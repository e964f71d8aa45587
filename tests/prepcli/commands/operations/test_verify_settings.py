"""`prep verify A B`: configs and tokenizers that differ, compared by their meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from tests.helpers.run_cli import error_lines, run_json, run_ok
from tests.helpers.tiny_checkpoints import checkpoint_tensors, write_checkpoint
from tests.helpers.tiny_configs import GOLDEN
from tests.helpers.towers import write_model

CONFIG = GOLDEN["llama"] | {"rope_theta": 10000.0, "eos_token_id": 2, "hidden_act": "silu"}
TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "added_tokens": [{"id": 3, "content": "<end>", "special": True}],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_model_folder(folder: str, config: dict[str, Any], **files: Any) -> None:
    """Write a tiny LLaMA with the same tensors in each folder, and with JSON files: `name` -> name.json."""
    tensors = checkpoint_tensors(GOLDEN["llama"], "float32", tied=False, legacy=False)
    write_checkpoint(Path(folder), config, tensors)
    for name, content in files.items():
        Path(folder, f"{name}.json").write_text(json.dumps(content))


def settings_of(a: str, b: str) -> dict[str, tuple[object, object]]:
    """Return the different settings of two equal models."""
    result = prep.verify(a, b)
    assert result.is_equal
    return {f"{s['kind']} {s['key']}": (s["a"], s["b"]) for s in result.settings}


DIFFERENT = {
    "rope_theta": 500000.0,
    "rms_norm_eps": 0.5,
    "hidden_act": "gelu",
    "eos_token_id": [2, 3],
    "max_position_embeddings": 4096,
    "initializer_range": 0.5,
}


def test_verify_prints_a_line_per_config_key(capsys: pytest.CaptureFixture[str]):
    write_model_folder("a", CONFIG | {"initializer_range": 0.02})
    write_model_folder("b", CONFIG | DIFFERENT)
    capsys.readouterr()
    assert main(["verify", "./a", "./b"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if " differs: " in line]
    assert "config differs: rope_theta 10000, 500000" in lines
    assert "config differs: eos_token_id 2, [2, 3]" in lines
    assert 'config differs: hidden_act "silu", "gelu"' in lines
    assert len(lines) == len(DIFFERENT)
    fields = run_json(capsys, "verify", "./a", "./b")
    assert {setting["key"] for setting in fields["settings"]} == {*DIFFERENT}
    (rope,) = [setting for setting in fields["settings"] if setting["key"] == "rope_theta"]
    assert rope == {"kind": "config", "key": "rope_theta", "a": 10000.0, "b": 500000.0}


def test_strict_fails_on_other_settings(capsys: pytest.CaptureFixture[str]):
    write_model_folder("a", CONFIG)
    write_model_folder("b", CONFIG | {"rope_theta": 500000.0})
    capsys.readouterr()
    what, why, hint = error_lines(capsys, "verify", "./a", "./b", "--strict")
    assert what == "error: ./a is not the same as ./b"
    assert why.strip() == "why: config differs: rope_theta 10000, 500000"
    assert "--strict" in hint
    assert not prep.verify("./a", "./b", strict=True)
    assert prep.verify("./a", "./a", strict=True)


@pytest.mark.parametrize("words", [(), ("--chain",), ("./a", "--logits")])
def test_strict_without_a_pair_of_files_is_refused(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    write_model_folder("a", CONFIG)
    (what, *_) = error_lines(capsys, "verify", "./a", "--strict", *words)
    assert "`--strict`" in what


@pytest.mark.parametrize(
    "fields",
    [
        {"torch_dtype": "bfloat16", "transformers_version": "4.1", "_name_or_path": "x"},
        {"attention_dropout": 0.0, "mlp_bias": False, "rope_scaling": None},
        {"use_cache": False, "initializer_range": 0.02},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000}},
    ],
    ids=["records", "defaults", "unused", "rope"],
)
def test_equal_meaning_is_no_difference(fields: dict[str, Any]):
    write_model_folder("a", CONFIG)
    config = CONFIG | fields
    write_model_folder("b", {key: value for key, value in config.items() if value is not None})
    assert settings_of("./a", "./b") == {}


def test_names_of_one_activation_are_no_difference():
    write_model_folder("a", CONFIG | {"hidden_act": "gelu_new"})
    write_model_folder("b", CONFIG | {"hidden_act": "gelu_pytorch_tanh"})
    assert settings_of("./a", "./b") == {}


def test_outputs_have_the_settings_of_their_source():
    write_model_folder("a", CONFIG, tokenizer=TOKENIZER)
    run_ok("pad-vocab", "./a", "--multiple", "64", "--out", "padded")
    run_ok("save-init", "./padded", "--dtype", "bfloat16", "--out", "narrow")
    run_ok("save-init", "./padded", "--out", "init")
    run_ok("export", "init", "--out", "hf")
    for output in ("padded", "init", "hf"):
        assert prep.verify(output, "./a", strict=True), output
    assert settings_of("narrow", "narrow") == {}


def test_settings_of_a_multimodal_model_are_compared():
    write_model("qwen3_vl")
    run_ok("save-init", "./m")
    assert prep.verify("m-init", "./m", strict=True)
    config = json.loads(Path("m/config.json").read_text())
    config["text_config"]["rms_norm_eps"] = 0.5
    config["vision_config"]["hidden_act"] = "other"
    config["image_token_id"] = 77
    Path("m/config.json").write_text(json.dumps(config))
    assert set(settings_of("m-init", "./m")) == {
        "config image_token_id",
        "config rms_norm_eps",
        "config vision_config.hidden_act",
    }


TOKENIZER_CHANGES = {
    "swapped": (
        {"model": {"type": "BPE", "vocab": {"b": 0, "a": 1, "ab": 2}, "merges": ["a b"]}},
        {"tokenizer token 0 and 1 more": ("a", "b")},
    ),
    "merge": (
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["b", "a"]]}},
        {"tokenizer merge 0": (["a", "b"], ["b", "a"])},
    ),
    "added": (
        {"added_tokens": [{"id": 3, "content": "<end>", "special": False}]},
        {"tokenizer added token 3": ("<end> (special)", "<end>")},
    ),
    "normalizer": (
        {"normalizer": {"type": "NFC"}},
        {"tokenizer normalizer": (None, {"type": "NFC"})},
    ),
    "merges as lists": (
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}},
        {},
    ),
    "truncation": ({"truncation": {"max_length": 8}}, {}),
}


@pytest.mark.parametrize("case", TOKENIZER_CHANGES)
def test_tokenizer_difference_is_named(case: str):
    change, expected = TOKENIZER_CHANGES[case]
    write_model_folder("a", CONFIG, tokenizer=TOKENIZER)
    write_model_folder("b", CONFIG, tokenizer=TOKENIZER | change)
    assert settings_of("./a", "./b") == expected


def test_special_tokens_and_template_are_compared():
    token = {"content": "<s>", "lstrip": False}
    write_model_folder(
        "a",
        CONFIG,
        tokenizer_config={"eos_token": "</s>", "chat_template": "x", "model_max_length": 5},
        special_tokens_map={"bos_token": "<s>"},
        generation_config={"eos_token_id": 2, "transformers_version": "4"},
    )
    write_model_folder(
        "b",
        CONFIG,
        tokenizer_config={"bos_token": token, "eos_token": "<end>", "add_bos_token": True},
        generation_config={"eos_token_id": 3, "transformers_version": "5"},
    )
    Path("b/chat_template.jinja").write_text("y")
    assert settings_of("./a", "./b") == {
        "generation_config eos_token_id": (2, 3),
        "tokenizer add_bos_token": (None, True),
        "tokenizer chat_template": ("x", "y"),
        "tokenizer eos_token": ("</s>", "<end>"),
    }


def test_missing_or_broken_tokenizer_is_named():
    write_model_folder("a", CONFIG, tokenizer=TOKENIZER)
    write_model_folder("b", CONFIG)
    assert [*settings_of("./a", "./b")] == ["tokenizer tokenizer.json"]
    Path("b/tokenizer.json").write_text("{")
    assert [*settings_of("./a", "./b")] == ["tokenizer tokenizer.json"]


def test_left_out_buffers_and_dropped_tensors_are_named(capsys: pytest.CaptureFixture[str]):
    tensors = checkpoint_tensors(GOLDEN["llama"], "float32", tied=False, legacy=False)
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    extra = {buffer: np.ones(4, np.float32), "model.extra": np.ones(4, np.float32)}
    write_checkpoint(Path("m"), CONFIG, tensors | extra)
    run_ok("save-init", "./m", "--drop", "model.extra")
    capsys.readouterr()
    assert main(["verify", "m-init", "./m"]) == 0
    err = capsys.readouterr().err
    fields = run_json(capsys, "verify", "m-init", "./m")
    assert {entry["tensor"] for entry in fields["left_out"]} == {*extra}
    assert all(name in err for name in extra)
    assert not prep.verify("m-init", "./m", strict=True)
