"""Writers of PyTorch checkpoints; functions import torch when they are called."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

META_LAYER_NAMES = {
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
# These matrices are sharded along their second dim. Each file has all norms.
COLUMN_SHARDED = ("attention.wo", "feed_forward.w2")


def to_torch(array: np.ndarray) -> Any:
    """Return a torch tensor with the same bits, of a dtype of NumPy or ml_dtypes."""
    import torch

    raw = torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy())
    kind = getattr(torch, array.dtype.name)
    return (
        raw.view(kind).reshape(array.shape) if array.size else torch.empty(array.shape, dtype=kind)
    )


def tensor_bytes(value: Any) -> bytes:
    """Return the bytes of a torch tensor in C order."""
    import torch

    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write_bin_folder(
    folder: Path, out: Path, tensors: Mapping[str, Any], num_files: int = 1
) -> Path:
    """Write pytorch_model.bin, or several files with an index, with the settings of another folder."""
    import torch

    copy_settings(folder, out)
    names = list(tensors)
    parts = [
        names[i * len(names) // num_files : (i + 1) * len(names) // num_files]
        for i in range(num_files)
    ]
    file_names: dict[str, str] = {}
    for i, part in enumerate(parts, 1):
        file = (
            "pytorch_model.bin"
            if num_files == 1
            else f"pytorch_model-{i:05d}-of-{num_files:05d}.bin"
        )
        torch.save({name: tensors[name] for name in part}, out / file)
        file_names |= dict.fromkeys(part, file)
    if num_files > 1:
        index = {"metadata": {"total_size": 1.5}, "weight_map": file_names}
        (out / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return out


def copy_settings(folder: Path, out: Path) -> None:
    """Create a folder with the JSON files of another one, except its weight index."""
    out.mkdir()
    for path in folder.iterdir():
        if path.suffix == ".json" and not path.name.endswith(".index.json"):
            shutil.copy(path, out)


def meta_params(config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return Meta's params.json for a LLaMA config, with `multiple_of` equal to the MLP size."""
    return {
        "dim": config["hidden_size"], "n_layers": config["num_hidden_layers"], "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"], "vocab_size": -1, "multiple_of": config["intermediate_size"],
        "ffn_dim_multiplier": 0.1, "norm_eps": config["rms_norm_eps"], **more,
    }  # fmt: skip


def write_meta_folder(
    out: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Any],
    num_files: int,
    embedding_axis: int = 1,
) -> Path:
    """Write a folder in Meta's format with the tensors of a Hugging Face model, sharded over `num_files` files."""
    import torch

    out.mkdir()
    (out / "params.json").write_text(json.dumps(meta_params(config)))
    (out / "tokenizer.model").write_bytes(b"words")
    (out / "checklist.chk").write_text("0  params.json")
    whole = {_meta_name(name): _interleaved(name, value, config) for name, value in tensors.items()}
    for i in range(num_files):
        part = {
            name: _part(name, value, i, num_files, embedding_axis) for name, value in whole.items()
        }
        torch.save(part | {"rope.freqs": torch.arange(4.0)}, out / f"consolidated.{i:02d}.pth")
    return out


def _meta_name(name: str) -> str:
    """Return the name of a tensor in Meta's checkpoints."""
    if not name.startswith("model.layers."):
        return {
            "model.embed_tokens.weight": "tok_embeddings.weight",
            "model.norm.weight": "norm.weight",
        }.get(name, "output.weight")
    _, _, layer, rest = name.split(".", 3)
    return f"layers.{layer}.{META_LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def _interleaved(name: str, value: Any, config: Mapping[str, Any]) -> Any:
    """Permute the rows of query and key projections to Meta's interleaved order."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(
        name.split(".")[-2]
    )
    if heads is None:
        return value
    return (
        value.view(config[heads], 2, -1, value.shape[1])
        .transpose(1, 2)
        .reshape(value.shape)
        .contiguous()
    )


def _part(name: str, value: Any, number: int, files: int, embedding_axis: int) -> Any:
    """Return the part of a tensor in one of Meta's files."""
    if value.dim() == 1:
        return value
    axis = (
        embedding_axis
        if name.startswith("tok")
        else int(any(part in name for part in COLUMN_SHARDED))
    )
    return value.chunk(files, axis)[number].clone()
