"""`prep verify`: quick checks, stored forms, settings and tolerances."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, USAGE, UsageError
from tests.helpers.damage import flip_bit
from tests.helpers.fused_experts import EXPERT_NAMES, fuse_experts
from tests.helpers.run_cli import Capture, error_lines, run_failing, run_json, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import (
    GPT2,
    LLAMA,
    checkpoint_tensors,
    make_checkpoint,
    read_tensors,
    write_checkpoint,
)
from tests.helpers.tiny_configs import GOLDEN
from tests.helpers.towers import write_model
from tests.helpers.training_folder import RECIPE, make_training_folder


@pytest.fixture
def gpt2_model() -> None:
    make_checkpoint(Path("m"), GPT2)


@pytest.mark.usefixtures("gpt2_model")
def test_verify_quick_of_a_pair_reports_shapes_not_values(capsys: Capture):
    make_checkpoint(Path("other"), GPT2)
    weights = next(Path("other").glob("*.safetensors"))
    flip_bit(weights, -1)
    assert main(["verify", "./m", "./other", "--quick"]) == 0
    out = capsys.readouterr().out
    assert re.match(r"ok: names, shapes and dtypes of \d+ tensors equal, no values read", out)
    assert "different" not in out
    fields = run_json(capsys, "verify", "./m", "./other", "--quick")
    assert fields["checked"] == ["names", "shapes", "dtypes"]
    assert fields["values"] is None
    assert "differences" not in fields
    assert run_json(capsys, "verify", "./m", "./other")["differences"]
    fields = run_json(capsys, "verify", "./m", "./m")
    assert (fields["differences"], "checked" in fields) == ([], False)
    assert fields["values"] > 0


@pytest.mark.usefixtures("gpt2_model")
def test_verify_quick_names_a_shape_that_differs(capsys: Capture):
    make_checkpoint(Path("wide"), GPT2, n_embd=64)
    fields = run_json(capsys, "verify", "./m", "./wide", "--quick")
    assert "has shapes" in fields["differences"][0]["what"]


@pytest.mark.usefixtures("gpt2_model")
def test_verify_quick_of_one_checkpoint_reports_headers(capsys: Capture):
    assert main(["save-init", "./m", "--out", "init", "-q"]) == 0
    capsys.readouterr()
    assert main(["verify", "init", "--quick"]) == 0
    out = capsys.readouterr().out
    assert re.match(
        r"ok: headers and file sizes of \d+ tensors, no values read, no digests checked \(", out
    )
    fields = run_json(capsys, "verify", "init", "--quick")
    assert fields["checked"] == ["headers", "file sizes"]
    assert fields["values"] is None
    assert "differences" not in fields


# `prep verify` of one model in two stored forms: it compares elements of the tree, not names in files


Tensors = dict[str, np.ndarray]


def write_forms(family: str) -> Tensors:
    """Write a model with separate and with fused experts, and an item of each. Return the fused tensors."""
    config = GOLDEN[family]
    tensors = checkpoint_tensors(config, "float32", tied=False, legacy=False)
    fused = fuse_experts(tensors, family)
    assert len(fused) < len(tensors)
    write_checkpoint(Path("separate"), config, tensors)
    write_checkpoint(Path("fused"), config, fused)
    run_ok("save-init", "./separate", "--no-verbatim", "--mesh", "1,2,1")
    run_ok("save-init", "./fused", "--no-verbatim", "--no-scan")
    return fused


@pytest.mark.parametrize("family", slow_except(list(EXPERT_NAMES), ["mixtral"]))
def test_fused_and_separate_experts_are_equal(family: str):
    write_forms(family)
    run_ok("save-init", "./fused", "--verbatim", "--out", "names")
    forms = ("./separate", "./fused", "separate-init", "fused-init", "names")
    for a, b in itertools.permutations(forms, 2):
        assert prep.verify(a, b), (a, b)
    assert prep.verify("./separate", "./fused", quick=True)
    result = prep.verify("./fused", "separate-init", tolerance=0.0)
    assert result
    assert {distance.max_abs for distance in result.distances} == {0.0}


@pytest.mark.parametrize("family", slow_except(list(EXPERT_NAMES), ["mixtral"]))
def test_changed_element_of_an_expert_is_named(family: str):
    fused = write_forms(family)
    name = next(name for name in fused if name.endswith("experts.gate_up_proj"))
    changed = fused[name].copy()
    # Row 1 of the second expert's gate.
    changed[1, 1, 2] += 1
    write_checkpoint(Path("changed"), GOLDEN[family], fused | {name: changed})
    for other in ("./separate", "separate-init", "fused-init"):
        (difference,) = prep.verify("./changed", other).differences
        assert difference.get("index") in ([1, 2], [1, 1, 2])
        assert difference.get("count") == 1


def test_equal_damage_in_two_forms_is_found():
    """The values of both sides are equal, but one side is an output whose manifest has another digest."""
    fused = write_forms("qwen3_moe")
    run_ok("export", "fused-init", "--out", "exported")
    name = next(name for name in fused if name.endswith("experts.gate_up_proj"))
    changed = fused[name].copy()
    changed[1, 1, 2] += 1
    path = next(Path("exported").glob("*.safetensors"))
    old, new = (values[1, :4].tobytes() for values in (fused[name], changed))
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    write_checkpoint(Path("fused-changed"), GOLDEN["qwen3_moe"], fused | {name: changed})
    separate = read_tensors(Path("separate"))
    gate = name.replace("experts.gate_up_proj", "experts.1.gate_proj.weight")
    separate[gate] = changed[1, : len(separate[gate])]
    write_checkpoint(Path("separate-changed"), GOLDEN["qwen3_moe"], separate)
    for other in ("./fused-changed", "./separate-changed"):
        with pytest.raises(prep.DamagedError, match="is damaged"):
            prep.verify("exported", other)


@pytest.mark.parametrize("is_equal", [True, False])
def test_untied_output_equals_its_source(is_equal: bool):
    """The config ties the head, and the file has one: `--untie` keeps it as a parameter."""
    config = GOLDEN["llama"] | {"tie_word_embeddings": True}
    tensors = checkpoint_tensors(config, "float32", tied=False, legacy=False)
    if is_equal:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    write_checkpoint(Path("m"), config, tensors)
    run_ok("save-init", "./m", "--untie")
    run_ok("export", "m-init", "--out", "hf")
    run_ok("pad-vocab", "./m", "--untie", "--multiple", "64", "--out", "padded")
    for output in ("m-init", "hf", "padded"):
        assert prep.verify(output, "./m")
        assert prep.verify("./m", output)
    # Without its own head, the model has the embedding in place of it.
    del tensors["lm_head.weight"]
    write_checkpoint(Path("tied"), config, tensors)
    result = prep.verify("m-init", "./tied")
    assert bool(result) == is_equal
    assert {entry["tensor"] for entry in result.differences} <= {"lm_head.weight"}


def test_adapter_of_a_run_equals_its_export():
    make_training_folder()
    recipe = RECIPE.replace("[train]\nsteps = 12", "[train]\nsteps = 1")
    Path("recipe.toml").write_text(recipe + "[lora]\nrank = 2\n")
    run_ok("train", "recipe.toml")
    run_ok("export", "runs/recipe", "--out", "adapter")
    assert prep.verify("runs/recipe", "adapter")
    assert prep.verify("adapter", "runs/recipe")
    path = Path("adapter/adapter_model.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[:-4] + np.float32(7).tobytes())
    manifest = json.loads(Path("adapter/prep-manifest.json").read_text())
    assert manifest["family"]
    assert len(prep.verify("runs/recipe", "adapter").differences) == 1


# `prep verify A B`: configs and tokenizers that differ, compared by their meaning


CONFIG = GOLDEN["llama"] | {"rope_theta": 10000.0, "eos_token_id": 2, "hidden_act": "silu"}
TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "added_tokens": [{"id": 3, "content": "<end>", "special": True}],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}


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


def test_verify_prints_a_line_per_config_key(capsys: Capture):
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


def test_strict_fails_on_other_settings(capsys: Capture):
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
def test_strict_without_a_pair_of_files_is_refused(words: tuple[str, ...], capsys: Capture):
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


def test_left_out_buffers_and_dropped_tensors_are_named(capsys: Capture):
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


# `prep verify A B --tolerance`: the distances of each tensor are those that NumPy computes


NAME = "model.norm.weight"


@pytest.fixture
def cast_models() -> None:
    """Write `a` in float32 and its init in bfloat16, `b`, to the working folder."""
    make_checkpoint(Path("a"), LLAMA)
    prep.save_init("a", "b", dtype="bfloat16", pad_vocab="16")


def change(folder: Path, value: float) -> None:
    """Set the first value of the last norm."""
    for path in folder.glob("*.safetensors"):
        tensors = safetensors.numpy.load_file(path)
        if NAME in tensors:
            tensors[NAME] = tensors[NAME].copy()
            tensors[NAME][0] = value
            safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.usefixtures("cast_models")
def test_distances_of_a_cast_are_those_of_numpy():
    result = prep.verify("a", "b", tolerance=0.1)
    assert result
    tensors = read_tensors(Path("a"))
    assert {distance.tensor for distance in result.distances} == tensors.keys()
    for distance in result.distances:
        a = tensors[distance.tensor].astype(np.float64).ravel()
        b = tensors[distance.tensor].astype(ml_dtypes.bfloat16).astype(np.float64).ravel()
        assert distance.max_abs == np.abs(a - b).max()
        np.testing.assert_allclose(distance.mean_abs, np.abs(a - b).mean(), rtol=1e-12)
        cosine = a @ b / (np.linalg.norm(a) * np.linalg.norm(b))
        np.testing.assert_allclose(distance.cosine, cosine, rtol=1e-12)


@pytest.mark.usefixtures("cast_models")
def test_tensor_beyond_the_tolerance_is_a_difference(capsys):
    largest = max(distance.max_abs for distance in prep.verify("a", "b", tolerance=1).distances)
    assert prep.verify("a", "b", tolerance=largest)
    result = prep.verify("a", "b", tolerance=largest / 2)
    assert not result
    too_far = [d.tensor for d in result.distances if d.max_abs > largest / 2]
    assert [difference["tensor"] for difference in result.differences] == too_far
    err = run_failing(capsys, FAILED, "verify", "a", "b", "--tolerance", str(largest / 2))
    assert "differs by up to" in err


@pytest.mark.usefixtures("cast_models")
@pytest.mark.parametrize(
    ("value_a", "value_b", "is_equal"),
    [
        (np.nan, np.nan, True),
        (np.inf, np.inf, True),
        (np.nan, 1.0, False),
        (np.inf, -np.inf, False),
    ],
)
def test_nan_and_infinity_are_equal_only_to_themselves(capsys, value_a, value_b, is_equal):
    make_checkpoint(Path("c"), LLAMA)
    change(Path("a"), value_a)
    change(Path("c"), value_b)
    assert bool(prep.verify("a", "c", tolerance=1e9)) is is_equal
    report = run_json(capsys, "verify", "a", "c", "--tolerance", "1e9")
    (entry,) = [entry for entry in report["distances"] if entry["tensor"] == NAME]
    assert entry["max_abs"] == (0.0 if is_equal else None)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("other_value", [np.inf, 0.0])
def test_cosine_of_values_that_are_not_finite_is_nan(value: float, other_value: float):
    for name, first in {"one": value, "other": other_value}.items():
        Path(name).mkdir()
        tensors = {"x": np.array([first, 0.0])}
        safetensors.numpy.save_file(tensors, Path(name, "model.safetensors"))
    (distance,) = prep.verify("one", "other", tolerance=1, verbatim=True).distances
    assert np.isnan(distance.cosine)


@pytest.mark.usefixtures("cast_models")
def test_table_lists_the_largest_differences_first(capsys):
    assert main(["verify", "a", "b", "--tolerance", "1", "-v"]) == 0
    out, err = capsys.readouterr()
    assert "largest difference" in out
    table = err[err.index("tensor ") :].splitlines()
    assert table[0].split() == ["tensor", "max", "mean", "cosine"]
    largest = [float(line.split()[-3]) for line in table[1:] if line.split()[-1:] != ["s"]]
    assert len(largest) == len(read_tensors(Path("a")))
    assert largest == sorted(largest, reverse=True)


@pytest.mark.usefixtures("cast_models")
def test_tolerance_needs_two_checkpoints_and_their_values(capsys):
    assert "second checkpoint" in run_failing(capsys, USAGE, "verify", "b", "--tolerance", "1")
    with pytest.raises(UsageError, match="exclude each other"):
        prep.verify("a", "b", tolerance=1, quick=True)
    run_failing(capsys, USAGE, "verify", "a", "b", "--tolerance", "-1")
    with pytest.raises(UsageError, match="it must be at least 0"):
        prep.verify("a", "b", tolerance=float("nan"))
