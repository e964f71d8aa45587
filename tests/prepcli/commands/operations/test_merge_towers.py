"""`prep merge` of adapters of multimodal classes, also against the merge of PEFT."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK
from tests.helpers.adapters import ALPHA, PREFIX, RANK, make_adapter
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.run_cli import Capture, MonkeyPatch, error_lines, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.stored_tensors import write_safetensors
from tests.helpers.tiny_checkpoints import assert_same, read_tensors
from tests.helpers.towers import model_values, read_golden, stored, write_model

# Files of the hub have a module more in their towers than `save_pretrained` of transformers 5 writes.
HUB_NAMES = {"llava": (r"^vision_tower\.", "vision_tower.vision_model.")}
# Multimodal type -> name in the file, names of the module in classes of transformers 5 and 4.
TEXT_CLASSES = {
    "llava": ("language_model.model.", "model.language_model.", "language_model.model."),
    "qwen2_5_vl": ("model.", "model.language_model.", "model."),
    "qwen3_vl": ("model.language_model.", "model.language_model.", "model.language_model."),
}
# Module of a tower in the file, and in classes of transformers 5 and 4.
TOWER_CLASSES = {
    "llava": (
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj",
        "model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj",
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj",
    ),
    "qwen2_5_vl": (
        "visual.blocks.0.attn.qkv",
        "model.visual.blocks.0.attn.qkv",
        "visual.blocks.0.attn.qkv",
    ),
    "qwen3_vl": (
        "model.visual.blocks.1.mlp.linear_fc2",
        "model.visual.blocks.1.mlp.linear_fc2",
        "visual.blocks.1.mlp.linear_fc2",
    ),
}
TEXT_MODULES = ("layers.0.self_attn.q_proj", "layers.1.mlp.down_proj")
CASES = [(model_type, version) for model_type in TEXT_CLASSES for version in (4, 5)]


def write_hub_model(model_type: str) -> dict[str, np.ndarray]:
    """Write a model with the names of its files on the hub, and return its tensors."""
    golden = read_golden(model_type)
    pattern, replacement = HUB_NAMES.get(model_type, ("(?!)", ""))
    values: dict[str, np.ndarray] = {}
    for name, value in model_values(golden["shapes"]).items():
        values[re.sub(pattern, replacement, name)] = value
    Path("m").mkdir()
    write_safetensors(Path("m/model.safetensors"), stored(values))
    Path("m/config.json").write_text(json.dumps(golden["config"]))
    return values


def merged_values(
    values: Mapping[str, np.ndarray], adapter: Mapping[str, np.ndarray], targets: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """Return the tensors of a model with an adapter added in float32.

    Args:
        values: Tensors of the model.
        adapter: Tensors of the adapter.
        targets: Module of the adapter -> module of the model.
    """
    expected = dict(values)
    for module, target in targets.items():
        a, b = (adapter[f"{PREFIX}{module}.lora_{matrix}.weight"] for matrix in "AB")
        expected[f"{target}.weight"] = values[f"{target}.weight"] + ALPHA / RANK * (b @ a)
    return expected


def assert_values(folder: str, expected: Mapping[str, np.ndarray]) -> None:
    """Check the tensors of a folder. Sums of products may differ in their last bits."""
    merged = load_file(Path(folder) / "model.safetensors")
    assert merged.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(merged[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("model_type", "version"), slow_except(CASES, [("llava", 4)]))
def test_adapter_of_a_multimodal_class_merges(model_type: str, version: int):
    values = write_hub_model(model_type)
    number = 1 if version == 5 else 2
    stored_prefix, prefix = TEXT_CLASSES[model_type][0], TEXT_CLASSES[model_type][number]
    targets = {f"{prefix}{module}": f"{stored_prefix}{module}" for module in TEXT_MODULES}
    targets[TOWER_CLASSES[model_type][number]] = TOWER_CLASSES[model_type][0]
    shapes = {module: values[f"{target}.weight"].shape for module, target in targets.items()}
    adapter = make_adapter(Path("adapter"), shapes)
    run_ok("merge", "adapter", "./m", "--out", "merged")
    expected = merged_values(values, adapter, targets)
    assert_values("merged", expected)
    run_ok("save-init", "./m", "--out", "init")
    run_ok("merge", "adapter", "init", "--out", "from-init")
    assert_values("from-init", expected)


def test_adapter_of_the_head_merges_under_both_names():
    values = write_hub_model("llava")
    shape = values["language_model.lm_head.weight"].shape
    for number, module in enumerate(("lm_head", "language_model.lm_head")):
        adapter = make_adapter(Path(f"adapter{number}"), {module: shape})
        run_ok("merge", f"adapter{number}", "./m", "--out", f"merged{number}")
        targets = {module: "language_model.lm_head"}
        assert_values(f"merged{number}", merged_values(values, adapter, targets))


@pytest.mark.parametrize(
    "module",
    [
        "model.vision_tower.encoder.layers.9.self_attn.q_proj",
        # Its end is the name of a module of the text part.
        "model.vision_tower.layers.0.self_attn.q_proj",
        "model.vision_model.layers.0.self_attn.q_proj",
        "model.audio_tower.language_model.layers.0.self_attn.q_proj",
    ],
)
def test_merge_names_a_module_that_the_base_lacks(module: str, capsys: Capture):
    write_model("llava")
    shape = (64, 64)
    text_module = "model.language_model.layers.0.self_attn.q_proj"
    make_adapter(Path("adapter"), {text_module: shape, module: shape})
    lines = error_lines(capsys, "merge", "adapter", "./m", "--out", "merged")
    assert lines[0] == "error: adapter does not fit the base"
    assert lines[1].endswith(f"the base has no tensor {module}.weight")
    assert not Path("merged").exists()


def test_merge_into_a_base_without_a_family(capsys: Capture):
    """Only the names in the files are needed, e.g. of PaliGemma, whose text part prep does not compute."""
    values = write_hub_model("llava")
    config = Path("m/config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "paligemma"}))
    text_module = "layers.1.mlp.down_proj"
    targets = {f"model.language_model.{text_module}": f"language_model.model.{text_module}"}
    targets[TOWER_CLASSES["llava"][1]] = TOWER_CLASSES["llava"][0]
    shapes = {module: values[f"{target}.weight"].shape for module, target in targets.items()}
    adapter = make_adapter(Path("adapter"), shapes)
    run_ok("merge", "adapter", "./m", "--out", "merged")
    assert_values("merged", merged_values(values, adapter, targets))
    make_adapter(Path("conv1d"), shapes, fan_in_fan_out=True)
    capsys.readouterr()
    lines = error_lines(capsys, "merge", "conv1d", "./m", "--out", "other")
    assert lines[0] == "error: ./m is not supported as a base of conv1d"


def test_merge_refuses_two_adapters_of_one_tensor(capsys: Capture):
    values = write_hub_model("llava")
    shape = values["language_model.model.layers.0.self_attn.q_proj.weight"].shape
    modules = ["model.language_model.layers.0.self_attn.q_proj", "layers.0.self_attn.q_proj"]
    make_adapter(Path("adapter"), dict.fromkeys(modules, shape))
    lines = error_lines(capsys, "merge", "adapter", "./m", "--out", "merged")
    assert lines[0] == "error: adapter has two adapters of one tensor"
    assert all(module in lines[1] for module in modules)


def test_merge_names_an_embedding_of_a_tower(capsys: Capture):
    write_model("llava")
    make_adapter(Path("adapter"), {"model.language_model.layers.0.self_attn.q_proj": (64, 64)})
    path = Path("adapter/adapter_model.safetensors")
    name = f"{PREFIX}model.vision_tower.embeddings.patch_embedding.lora_A.weight"
    save_file(load_file(path) | {name: np.zeros((RANK, 3, 2, 2), np.float32)}, path)
    config = Path("adapter/adapter_config.json")
    settings = json.loads(config.read_text())
    settings["target_modules"].append("patch_embedding")
    config.write_text(json.dumps(settings))
    assert main(["merge", "adapter", "./m", "--out", "merged", "-q"]) == FAILED
    assert "vision_tower.embeddings.patch_embedding" in capsys.readouterr().err


# Adapters of PEFT for multimodal classes of transformers: `prep merge` against the merge of PEFT, with images


torch = lazy_module("torch")
transformers = lazy_module("transformers")
peft = lazy_module("peft")
IMAGE = 90
TEXT = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "model_type": "clip_vision_model",
    "projection_dim": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# Names of the class of transformers 5 -> names of the files on the hub, and of the class of transformers 4.
LLAVA_NAMES = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^model\.vision_tower\.(vision_model\.)?", "vision_tower.vision_model."),
    (r"^model\.multi_modal", "multi_modal"),
    (r"^lm_head", "language_model.lm_head"),
)


def renamed(name: str) -> str:
    """Return the name of a tensor in files of the hub."""
    for pattern, replacement in LLAVA_NAMES:
        if re.match(pattern, name):
            return re.sub(pattern, replacement, name)
    return name


def make_base() -> Any:
    """Write a tiny model with the names of files on the hub, and return it."""
    config = transformers.LlavaConfig(
        text_config=TEXT, vision_config=VISION, image_token_index=IMAGE
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.08)
    model.save_pretrained("base")
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        tensors[renamed(name)] = tensor.numpy()
    save_file(tensors, "base/model.safetensors", {"format": "pt"})
    return model


def logits(model: Any, inputs: Mapping[str, Any]) -> np.ndarray:
    with torch.no_grad():
        return model(**inputs).logits.numpy()


@pytest.mark.slow
def test_merge_equals_the_merge_of_peft(monkeypatch: MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = make_base()
    tokens = torch.tensor([[1, 5, *[IMAGE] * 4, 7, 8, 9]])
    inputs = {"pixel_values": torch.randn(1, 3, 28, 28), "input_ids": tokens}
    settings = peft.LoraConfig(r=4, lora_alpha=12, target_modules="all-linear")
    trained = peft.get_peft_model(model, settings)
    for parameter_name, parameter in trained.named_parameters():
        if "lora_" in parameter_name:
            parameter.data.normal_(std=0.15)
    trained.save_pretrained("adapter")
    modules = load_file("adapter/adapter_model.safetensors")
    assert any("vis" in module for module in modules)
    peft_model = trained.merge_and_unload()
    expected = logits(peft_model, inputs)
    assert main(["merge", "adapter", "base", "--out", "merged", "-q"]) == OK
    values = load_file("merged/model.safetensors")
    for tensor_name, tensor in peft_model.state_dict().items():
        value = values.pop(renamed(tensor_name))
        np.testing.assert_allclose(value, tensor.numpy(), atol=1e-6, err_msg=tensor_name)
    assert not values
    merged = transformers.LlavaForConditionalGeneration.from_pretrained("merged").eval()
    np.testing.assert_allclose(logits(merged, inputs), expected, atol=2e-5)
    # The same adapter with the modules of transformers 4.
    prefix = "base_model.model."
    old = {prefix + renamed(n.removeprefix(prefix)): v for n, v in modules.items()}
    save_file(old, "adapter/adapter_model.safetensors")
    assert main(["merge", "adapter", "base", "--out", "merged-old", "-q"]) == OK
    first, second = (read_tensors(Path(folder)) for folder in ("merged", "merged-old"))
    assert_same(first, second)
