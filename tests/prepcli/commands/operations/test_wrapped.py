"""Weights as training scripts save them: prefixes, state dicts beside other values, names of Mistral."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import prepcli as prep
from prepcli.commands.cli.main import main
from tests.helpers.damage import flip_bit
from tests.helpers.golden_flax import LLAMA as FLAX_LLAMA
from tests.helpers.pickle_builder import make_checkpoint_file, make_torch_file
from tests.helpers.quantized_folders import make_quantized
from tests.helpers.run_cli import Capture, exported_tensors, run_failing, run_json, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.stored_tensors import write_safetensors
from tests.helpers.tiny_checkpoints import GPT2, LLAMA, assert_same, make_checkpoint, read_tensors
from tests.helpers.torch_checkpoints import META_LAYER_NAMES
from tests.helpers.towers import write_model


def write_weights(name: str, content: bytes) -> None:
    """Write a folder `w` with the config of `m` and a file of weights."""
    Path("w").mkdir()
    shutil.copy("m/config.json", "w")
    Path("w", name).write_bytes(content)


def write_prefixed(tensors: dict[str, np.ndarray], prefix: str, name: str) -> None:
    """Write a folder `w` with a prefix on all names."""
    prefixed = {prefix + key: value for key, value in tensors.items()}
    if name.endswith(".bin"):
        write_weights(name, make_torch_file(prefixed))
    else:
        write_weights(name, b"")
        save_file(prefixed, Path("w", name))


PREFIXED_FILES = [
    ("_orig_mod.", "pytorch_model.bin"),
    ("module.model.", "model.safetensors"),
    ("_orig_mod.module.", "model.safetensors"),
]


@pytest.mark.parametrize(("prefix", "name"), slow_except(PREFIXED_FILES, PREFIXED_FILES[::2]))
def test_prefix_of_all_names_is_taken_off(prefix: str, name: str, capsys: Capture) -> None:
    tensors = make_checkpoint(Path("m"), LLAMA)
    write_prefixed(tensors, prefix, name)
    assert main(["save-init", "./w", "--out", "init"]) == 0
    note = f"the prefix `{prefix}` of all tensors of ./w is taken off"
    assert note in capsys.readouterr().err
    assert_same(exported_tensors("init"), tensors)
    run_ok("verify", "./w", "./m")
    run_ok("verify", "init", "./w")


def test_prefix_of_a_tied_model_is_taken_off() -> None:
    """The family's own prefix is common to all names of a tied model, and stays."""
    tensors = make_checkpoint(Path("m"), LLAMA | {"tie_word_embeddings": True})
    tensors.pop("lm_head.weight", None)
    write_prefixed(tensors, "model.", "model.safetensors")
    run_ok("pad-vocab", "./w", "--size", "131", "--out", "padded")
    assert_same(read_tensors(Path("padded")), tensors)


def test_own_prefix_of_a_family_is_kept(capsys: Capture) -> None:
    tensors = make_checkpoint(Path("m"), GPT2)
    assert main(["pad-vocab", "./m", "--size", "131", "--out", "padded"]) == 0
    assert "taken off" not in capsys.readouterr().err
    assert_same(read_tensors(Path("padded")), tensors)


def test_prefix_of_a_multimodal_model_is_taken_off() -> None:
    tensors = write_model("qwen3_vl", Path("m"))
    shutil.copytree("m", "w")
    prefixed = {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}
    write_safetensors(Path("w/model.safetensors"), prefixed)
    run_ok("save-init", "./w", "--out", "init")
    assert json.loads(Path("init/prep-manifest.json").read_text())["family"] == "qwen3"
    assert exported_tensors("init").keys() == tensors.keys()
    run_ok("verify", "exported", "./m")


def test_verbatim_keeps_a_prefix() -> None:
    tensors = make_checkpoint(Path("m"), LLAMA)
    write_prefixed(tensors, "module.", "model.safetensors")
    run_ok("save-init", "./w", "--verbatim", "--out", "init")
    assert_same(exported_tensors("init"), {f"module.{k}": v for k, v in tensors.items()})


def test_drop_of_a_prefixed_name() -> None:
    tensors = make_checkpoint(Path("m"), LLAMA)
    write_prefixed(tensors | {"head.weight": np.zeros(3, np.float32)}, "module.", "x.safetensors")
    run_ok("save-init", "./w", "--drop", "module.head.*", "--out", "init")
    assert_same(exported_tensors("init"), tensors)


def checkpoint_values(tensors: dict[str, np.ndarray]) -> dict[str, object]:
    """Return the entries of a checkpoint of nanoGPT, with the states of random generators."""
    return {
        "model": tensors,
        "optimizer": {"state": {}, "param_groups": {}},
        "iter_num": 5,
        "best_val_loss": np.float32(1.5),
        "rng_state": np.arange(5, dtype=np.uint8),
    }


def test_state_dict_beside_a_tensor_is_read(capsys: Capture) -> None:
    tensors = make_checkpoint(Path("m"), LLAMA)
    prefixed = {f"_orig_mod.{key}": value for key, value in tensors.items()}
    write_weights("ckpt.pt", make_checkpoint_file(checkpoint_values(prefixed)))
    assert main(["save-init", "./w", "--out", "init"]) == 0
    error = capsys.readouterr().err
    assert "the tensors under `model` of ckpt.pt are read, not `optimizer`, `iter_num`" in error
    assert_same(exported_tensors("init"), tensors)


def test_state_dict_under_another_key_is_read() -> None:
    tensors = make_checkpoint(Path("m"), LLAMA)
    values = {"net": tensors, "rng": {"cpu": np.arange(5, dtype=np.uint8)}}
    write_weights("ckpt.pt", make_checkpoint_file(values))
    run_ok("save-init", "./w", "--out", "init")
    assert_same(exported_tensors("init"), tensors)


def test_two_state_dicts_are_named(capsys: Capture) -> None:
    tensors = make_checkpoint(Path("m"), LLAMA)
    write_weights("ckpt.pt", make_checkpoint_file({"net": tensors, "ema": tensors}))
    error = run_failing(capsys, 1, "save-init", "./w", "--out", "init")
    assert "it has tensors by name in `net` and `ema`, which is ambiguous" in error
    assert "torch.save() only the model's state_dict()" in error
    assert "download" not in error


def test_flax_file_of_any_name_is_found(capsys: Capture) -> None:
    name = "weights.msgpack"
    Path("f").mkdir()
    shutil.copy(FLAX_LLAMA / "flax/config.json", "f")
    shutil.copy(FLAX_LLAMA / "flax/flax_model.msgpack", Path("f", name))
    run_ok("save-init", "./f", "--out", "init")
    assert_same(exported_tensors("init"), read_tensors(FLAX_LLAMA / "hf"))
    assert run_json(capsys, "inspect", "./f")["source"]["format"] == "flax"
    shutil.copy(Path("f", name), "f/other.msgpack")
    error = run_failing(capsys, 1, "save-init", "./f", "--out", "x")
    assert "holds 2 msgpack files" in error
    assert "name one of them" in error


CUT = "download it again"
WHOLE = "get or create the checkpoint again"


@pytest.mark.parametrize(
    "name",
    slow_except(
        ["model.safetensors", "pytorch_model.bin", "flax_model.msgpack"],
        ["model.safetensors", "flax_model.msgpack"],
    ),
)
def test_hint_downloads_only_cut_files(name: str, capsys: Capture) -> None:
    tensors = make_checkpoint(Path("m"), LLAMA)
    write_weights(name, b"")
    if name == "model.safetensors":
        save_file(tensors, Path("w", name))
    elif name == "pytorch_model.bin":
        Path("w", name).write_bytes(make_torch_file(tensors))
    else:
        shutil.copy(FLAX_LLAMA / "flax/flax_model.msgpack", Path("w", name))
    content = Path("w", name).read_bytes()
    for damaged in (content[:-100], content[: len(content) // 2], b""):
        Path("w", name).write_bytes(damaged)
        assert CUT in run_failing(capsys, 1, "save-init", "./w", "--out", "init")
    # All bytes are there, and one has another value. A safetensors file begins with the length of its header.
    position = 8 if name == "model.safetensors" else 0
    flipped = bytes([content[position] ^ 0x40])
    Path("w", name).write_bytes(content[:position] + flipped + content[position + 1 :])
    error = run_failing(capsys, 1, "save-init", "./w", "--out", "init")
    assert CUT not in error
    assert "hint: " in error


def test_hint_for_an_index_without_weights(capsys: Capture) -> None:
    make_checkpoint(Path("m"), LLAMA)
    index = Path("m/model.safetensors.index.json")
    whole = index.read_text()
    index.write_text(json.dumps({"metadata": {}}))
    assert WHOLE in run_failing(capsys, 1, "save-init", "./m", "--out", "init")
    index.write_text(whole[:-20])
    assert CUT in run_failing(capsys, 1, "save-init", "./m", "--out", "init")


# Quantised, multimodal and verbatim models with the prefix of a wrapper on all names


PREFIX = "_orig_mod."


def wrap(prefix: str = PREFIX) -> None:
    """Write a folder `w` with the tensors of `m` under prefixed names in one file."""
    shutil.copytree("m", "w", ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    tensors = read_tensors(Path("m"))
    save_file({prefix + name: value for name, value in tensors.items()}, "w/model.safetensors")


def write_wrapped_model(extra: str = "", *, prefix: str = PREFIX) -> set[str]:
    """Write a multimodal model to `m`, and with a prefix and an extra tensor to `w`. Return its names."""
    tensors = write_model("qwen3_vl", Path("m"))
    shutil.copytree("m", "w")
    prefixed = {prefix + name: tensor for name, tensor in tensors.items()}
    if extra:
        prefixed[prefix + extra] = ("F32", (3,), bytes(12))
    write_safetensors(Path("w/model.safetensors"), prefixed)
    return set(tensors)


def test_dequantized_wrapped_model_verifies() -> None:
    values = make_quantized(Path("m"), "gptq")
    wrap()
    run_ok("save-init", "./w", "--quantized", "dequantize", "--out", "init")
    run_ok("export", "init", "--quantized", "dequantize", "--out", "exported")
    expected = {name: value.astype(ml_dtypes.bfloat16) for name, value in values.items()}
    assert_same(read_tensors(Path("exported")), expected)
    run_ok("verify", "init", "./w")
    run_ok("verify", "init", "./m")
    run_ok("save-init", "./w", "--quantized", "keep", "--out", "kept")
    run_ok("verify", "kept", "init")
    run_ok("verify", "init", "kept")


def test_lock_of_a_wrapped_multimodal_model_has_file_names() -> None:
    write_wrapped_model()
    run_ok("lock", "./w", "--out", "w.lock")
    locked = json.loads(Path("w.lock").read_text())["tensors"]
    assert locked.keys() == load_file("w/model.safetensors").keys()
    run_ok("save-init", "./w", "--lock", "w.lock", "--out", "init")


def test_recorded_drop_of_a_wrapped_verbatim_output() -> None:
    tensors = make_checkpoint(Path("m"), LLAMA)
    extra = {"head.weight": np.zeros(3, np.float32)}
    write_prefixed(tensors | extra, PREFIX, "model.safetensors")
    drop = ("--drop", "_orig_mod.head.*")
    run_ok("save-init", "./w", "--verbatim", *drop, "--out", "verbatim")
    run_ok("verify", "verbatim", "./w")
    run_ok("save-init", "./w", *drop, "--out", "init")
    run_ok("verify", "init", "./w")


def test_inspect_of_a_wrapped_multimodal_model(capsys: Capture) -> None:
    write_wrapped_model()
    reports: list[str] = []
    for folder in ("m", "w"):
        assert main(["inspect", f"./{folder}"]) == 0
        reports.append(capsys.readouterr().out)
    assert "139,968" in reports[0]
    assert "139,968" in reports[1]
    assert "not the tensors" not in reports[1]
    # A tensor of the towers has the same leaf.
    tower = next(name for name in load_file("m/model.safetensors") if ".visual." in name)
    drawings: list[str] = []
    for folder in ("m", "w"):
        run_ok("inspect", f"./{folder}", "--shards", f"towers.{tower}", "--mesh", "1,1,1")
        drawings.append(capsys.readouterr().out.replace(f"./{folder}", ""))
    assert drawings[0] == drawings[1]


@pytest.mark.parametrize(
    "pattern", slow_except(["*.k_scale", "_orig_mod.*.k_scale"], ["_orig_mod.*.k_scale"])
)
def test_drop_of_a_wrapped_multimodal_model(pattern: str) -> None:
    names = write_wrapped_model("model.language_model.layers.0.self_attn.k_scale")
    run_ok("save-init", "./w", "--drop", pattern, "--out", "init")
    assert exported_tensors("init").keys() == names
    run_ok("verify", "init", "./w")
    run_ok("verify", "./w", "init")
    run_ok("save-init", "./w", "--drop", pattern, "--verbatim", "--out", "verbatim")
    run_ok("verify", "verbatim", "./w")
    run_ok("verify", "verbatim", "init")


@pytest.mark.parametrize("prefix", slow_except(["", PREFIX], [PREFIX]))
def test_text_only_export_after_drop_verifies(prefix: str) -> None:
    extra = "model.language_model.layers.0.self_attn.k_scale"
    names = write_wrapped_model(extra, prefix=prefix)
    run_ok("save-init", "./w", "--drop", "*.k_scale", "--out", "init")
    run_ok("export", "init", "--text-only", "--out", "text")
    text = "model.language_model."
    expected = {
        name.replace(text, "model.") for name in names if name.startswith((text, "lm_head."))
    }
    assert read_tensors(Path("text")).keys() == expected
    run_ok("verify", "text", "./w")
    run_ok("verify", "./w", "text")
    links = prep.verify_chain("text").links
    assert [link.status for link in links] == ["proven", "proven"]
    assert links[0].proof.startswith("manifest, 47 tensors, ")
    assert links[0].changed.startswith("left out: towers, ")
    flip_bit(Path("text/model.safetensors"), -1)
    assert main(["verify", "text", "./w", "-q"]) == 1
    assert main(["verify", "--chain", "text", "-q"]) == 1


def test_partly_wrapped_names_are_named(capsys: Capture) -> None:
    tensors = make_checkpoint(Path("m"), LLAMA)
    head = {"lm_head.weight": tensors.pop("lm_head.weight")}
    write_weights("model.safetensors", b"")
    prefixed = {PREFIX + name: value for name, value in tensors.items()}
    save_file(prefixed | head, "w/model.safetensors")
    error = run_failing(capsys, 1, "save-init", "./w", "--out", "init")
    assert "some names begin with `_orig_mod.`" in error
    assert "config.json and the weights" not in error


# Conversions of Mistral's own checkpoints: `consolidated.safetensors` with Meta's names, and `params.json`


# The heads are wider than hidden_size / heads, as in Mistral Nemo.
CONFIG: dict[str, Any] = LLAMA | {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "head_dim": 8,
    "sliding_window": 16,
}
PARAMS = {
    "dim": 32, "n_layers": 3, "head_dim": 8, "hidden_dim": 48, "n_heads": 8, "n_kv_heads": 4, "norm_eps": 1e-05,
    "vocab_size": 131, "rope_theta": 1000000.0, "sliding_window": 16,
}  # fmt: skip


def native_tensors(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tensors with Mistral's names, and the rows of queries and keys in pairs of neighbours.

    This is the inverse of `permute_for_rope` of transformers.
    """
    native: dict[str, np.ndarray] = {}
    outer = {
        "model.embed_tokens.weight": "tok_embeddings.weight",
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "output.weight",
    }
    for name, value in tensors.items():
        if name in outer:
            native[outer[name]] = value
            continue
        _, _, layer, rest = name.split(".", 3)
        heads = {"self_attn.q_proj.weight": 8, "self_attn.k_proj.weight": 4}.get(rest)
        if heads:
            pairs = value.reshape(heads, 2, 4, 32).transpose(0, 2, 1, 3)
            value = np.ascontiguousarray(pairs.reshape(value.shape))
        native[f"layers.{layer}.{META_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"] = value
    return native


def write_native(**changes: Any) -> dict[str, np.ndarray]:
    """Write a folder `w` with Mistral's files, and return the tensors of Hugging Face."""
    tensors = make_checkpoint(Path("m"), CONFIG)
    Path("w").mkdir()
    save_file(native_tensors(tensors), Path("w/consolidated.safetensors"))
    Path("w/params.json").write_text(json.dumps(PARAMS | changes))
    Path("w/tekken.json").write_text("{}")
    return tensors


def test_native_mistral_converts_to_the_hf_model() -> None:
    tensors = write_native()
    run_ok("save-init", "./w", "--out", "init")
    assert_same(exported_tensors("init"), tensors)
    config = json.loads(Path("exported/config.json").read_text())
    expected = {key: CONFIG[key] for key in CONFIG if key in config and not key.endswith("_id")}
    expected |= {"rope_theta": 1000000.0, "max_position_embeddings": 32768}
    assert {key: config[key] for key in expected} == expected
    assert Path("exported/tekken.json").exists()
    assert not Path("exported/params.json").exists()
    run_ok("verify", "init", "./w")


def test_config_of_native_mistral_loads_in_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    write_native(sliding_window=None)
    run_ok("pad-vocab", "./w", "--size", "131", "--out", "hf")
    config = transformers.AutoConfig.from_pretrained("hf")
    assert (config.model_type, config.head_dim, config.sliding_window) == ("mistral", 8, None)
    assert config.rope_parameters["rope_theta"] == 1000000.0


def test_native_mistral_with_its_config_is_converted() -> None:
    tensors = write_native()
    Path("w/config.json").write_text(json.dumps(CONFIG))
    run_ok("save-init", "./w", "--out", "init")
    assert_same(exported_tensors("init"), tensors)


def test_native_file_beside_the_hf_model_is_left(capsys: Capture) -> None:
    tensors = write_native()
    for name in ("consolidated.safetensors", "params.json"):
        Path("m", name).write_bytes(Path("w", name).read_bytes())
    assert main(["save-init", "./m", "--out", "init"]) == 0
    error = capsys.readouterr().err
    assert "left out: consolidated.safetensors (other weights)" in error
    assert_same(exported_tensors("init"), tensors)


@pytest.mark.parametrize("changes", [{"moe": {"num_experts": 8}}, {"vision_encoder": {}}])
def test_other_models_of_mistral_keep_their_names(changes: dict[str, Any]) -> None:
    tensors = write_native(**changes)
    run_ok("save-init", "./w", "--out", "init")
    assert_same(exported_tensors("init"), native_tensors(tensors))


def test_verbatim_keeps_the_names_of_mistral(capsys: Capture) -> None:
    tensors = write_native()
    run_ok("save-init", "./w", "--verbatim", "--out", "init")
    assert_same(exported_tensors("init"), native_tensors(tensors))
    assert run_json(capsys, "inspect", "./w")["source"]["format"] == "meta"
