"""Adapters of PEFT for multimodal classes of transformers: `prep merge` against the merge of PEFT, with images."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prepcli.commands.cli.main import main
from prepcli.core.errors import OK
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.slow_cases import slow_except

torch = lazy_module("torch")
transformers = lazy_module("transformers")
peft = lazy_module("peft")

IMAGE = 90
TEXT = {
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
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}
# Names of the class of transformers 5 -> names of the files on the hub, and of the class of transformers 4.
LLAVA_NAMES = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^model\.vision_tower\.(vision_model\.)?", "vision_tower.vision_model."),
    (r"^model\.multi_modal", "multi_modal"),
    (r"^lm_head", "language_model.lm_head"),
)
QWEN_NAMES = ((r"^model\.language_model\.", "model."), (r"^model\.visual\.", "visual."))
PIXTRAL_NAMES = (
    LLAVA_NAMES[0],
    (r"^model\.vision_tower\.", "vision_tower."),
    *LLAVA_NAMES[2:],
)


@dataclass(frozen=True)
class Case:
    """A multimodal class: its configs, the names of its files, and the inputs with an image."""

    model: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    names: tuple[tuple[str, str], ...]
    inputs: Callable[[], dict[str, Any]]
    fields: Mapping[str, Any]


def image_inputs(num_tokens: int, size: int = 28, **fields: Any) -> dict[str, Any]:
    """Return the tokens of a text with an image, and its pixels."""
    tokens = [1, 5, *[IMAGE] * num_tokens, 7, 8, 9]
    pixels = torch.randn(1, 3, size, size)
    return {"pixel_values": pixels, "input_ids": torch.tensor([tokens]), **fields}


def qwen_inputs() -> dict[str, Any]:
    """Return the inputs of a Qwen class: four patches are one token."""
    return {
        "pixel_values": torch.randn(4, 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
        "input_ids": torch.tensor([[1, 5, 92, IMAGE, 93, 7, 8, 9]]),
        "mm_token_type_ids": torch.tensor([[0, 0, 0, 1, 0, 0, 0, 0]]),
    }


def gemma_inputs() -> dict[str, Any]:
    inputs = image_inputs(4)
    return inputs | {"token_type_ids": (inputs["input_ids"] == IMAGE).long()}


def mistral_inputs() -> dict[str, Any]:
    return image_inputs(4, size=56, image_sizes=torch.tensor([[56, 56]]))


def mrope(**fields: Any) -> dict[str, Any]:
    """Return the rotary embedding of a Qwen class."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    return {"rope_parameters": rope | fields}


CASES = {
    "gemma3": Case(
        "Gemma3",
        {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
        VISION,
        LLAVA_NAMES,
        gemma_inputs,
        {"mm_tokens_per_image": 4, "image_token_index": IMAGE},
    ),
    "llava": Case(
        "Llava",
        {"model_type": "llama"},
        {**VISION, "model_type": "clip_vision_model", "projection_dim": 32},
        LLAVA_NAMES,
        lambda: image_inputs(4),
        {"image_token_index": IMAGE},
    ),
    "mistral3": Case(
        "Mistral3",
        {"model_type": "mistral"},
        {**VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 56},
        PIXTRAL_NAMES,
        mistral_inputs,
        {"image_token_index": IMAGE, "spatial_merge_size": 2},
    ),
    "qwen2_5_vl": Case(
        "Qwen2_5_VL",
        mrope(),
        {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [0],
        },
        QWEN_NAMES,
        qwen_inputs,
        QWEN_TOKENS,
    ),
    "qwen3_vl": Case(
        "Qwen3VL",
        {"head_dim": 16, **mrope(mrope_interleaved=True)},
        {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 14,
            "deepstack_visual_indexes": [0],
        },
        (),
        qwen_inputs,
        QWEN_TOKENS,
    ),
}


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)


def renamed(name: str, names: tuple[tuple[str, str], ...]) -> str:
    """Return the name of a tensor in files of the hub."""
    for pattern, replacement in names:
        if re.match(pattern, name):
            return re.sub(pattern, replacement, name)
    return name


def make_base(case: Case) -> Any:
    """Write a tiny model with the names of files on the hub, and return it."""
    config_class = getattr(transformers, f"{case.model}Config")
    config = config_class(
        text_config={**TEXT, **case.text}, vision_config={**case.vision}, **case.fields
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{case.model}ForConditionalGeneration")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.08)
    model.save_pretrained("base")
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        tensors[renamed(name, case.names)] = tensor.numpy()
    if model.config.tie_word_embeddings:
        tensors.pop(renamed("lm_head.weight", case.names))
    save_file(tensors, "base/model.safetensors", {"format": "pt"})
    return model


def logits(model: Any, inputs: Mapping[str, Any]) -> np.ndarray:
    with torch.no_grad():
        return model(**inputs).logits.numpy()


@pytest.mark.parametrize("name", slow_except(list(CASES), ["llava"]))
def test_merge_equals_the_merge_of_peft(name: str):
    case = CASES[name]
    model = make_base(case)
    model_class = type(model)
    inputs = case.inputs()
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
        # A tied head is not stored.
        value = values.pop(renamed(tensor_name, case.names), tensor.numpy())
        np.testing.assert_allclose(value, tensor.numpy(), atol=1e-6, err_msg=tensor_name)
    assert not values
    merged = model_class.from_pretrained("merged").eval()
    np.testing.assert_allclose(logits(merged, inputs), expected, atol=2e-5)
    # The same adapter with the modules of transformers 4.
    prefix = "base_model.model."
    old = {prefix + renamed(n.removeprefix(prefix), case.names): v for n, v in modules.items()}
    save_file(old, "adapter/adapter_model.safetensors")
    assert main(["merge", "adapter", "base", "--out", "merged-old", "-q"]) == OK
    first, second = (
        load_file(f"{folder}/model.safetensors") for folder in ("merged", "merged-old")
    )
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[tensor], second[tensor]) for tensor in first)
