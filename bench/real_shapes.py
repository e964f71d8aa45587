"""Plan large published checkpoints from their headers: `prep inspect` and `prep save-init --dry-run` of sparse files.

    python -m bench.real_shapes --work FOLDER
    python -m bench.real_shapes --work FOLDER gpt-oss-120b --mesh 1,8,1 --quantized dequantize

The table has CPU seconds and the peak of anonymous memory of both commands, for the first of the meshes with a plan: an
index has at most 2,097,152 chunks.

transformers gives the names and shapes of the tensors. Weights of fp8 and MXFP4 models are stored with their scales, as
published. The files take no disk. Needs the `parity` extra.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.evidence import PREP, log, remove, run_checked
from bench.meter import CommandCost, measure
from bench.models import SHARD_NBYTES
from prepcli.commands.testing.tiny_model import to_file_tensors
from prepcli.core.tables import format_table
from prepcli.formats.safetensors import (
    INDEX_FILE,
    LayoutEntry,
    encode_index,
    lay_out_files,
    split_into_shards,
)
from prepcli.planning.tensors import itemsize
from prepcli.targets.hf_folder import json_bytes

Shape = tuple[int, ...]
ConfigFields = dict[str, Any]
GB, MB = 10**9, 10**6
FP8_BLOCK = 128
MXFP4_BLOCK = 32
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
MXFP4 = {"quant_method": "mxfp4"}
# The defaults of the config classes of transformers 5.24 are the sizes of DeepSeek-V3, gpt-oss-120b and Llama 4 Scout.
# Sources of the other sizes: slime (Qwen3.5), and the sums of parameters in the names of the models.
DEEPSEEK_V3: ConfigFields = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "quantization_config": FP8,
}
KIMI_K2: ConfigFields = {
    **DEEPSEEK_V3,
    "model_type": "kimi_k2",
    "num_nextn_predict_layers": 0,
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
}
GPT_OSS: ConfigFields = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "quantization_config": MXFP4,
}
QWEN_35: ConfigFields = {
    "model_type": "qwen3_5_moe",
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 4096,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
        "linear_num_value_heads": 64,
    },
    "vision_config": {"out_hidden_size": 4096},
}
MAVERICK: ConfigFields = {
    "model_type": "llama4",
    "architectures": ["Llama4ForConditionalGeneration"],
    "text_config": {
        "model_type": "llama4_text",
        "num_local_experts": 128,
        "interleave_moe_layer_step": 2,
    },
    "vision_config": {},
}
GEMMA_4: ConfigFields = {
    "model_type": "gemma4",
    "architectures": ["Gemma4ForConditionalGeneration"],
    "text_config": {
        "model_type": "gemma4_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    "audio_config": None,
}
MODELS: Mapping[str, ConfigFields] = {
    "Kimi-K2": KIMI_K2,
    "DeepSeek-V3": DEEPSEEK_V3,
    "Qwen3.5-397B-A17B": QWEN_35,
    "gpt-oss-120b": GPT_OSS,
    "Llama-4-Maverick": MAVERICK,
    "Gemma-4-31B": GEMMA_4,
}


# Tried in this order.
MESHES = ("1,64,4", "1,32,4", "1,8,4", "1,4,4")


@dataclass(frozen=True, slots=True)
class ShapesRow:
    """Costs of `inspect` and of the plan of one model. `mapping` is "family" or "verbatim"."""

    name: str
    mapping: str
    mesh: str
    nbytes: int
    tensors: int
    inspect: CommandCost
    plan: CommandCost


def stored_entries(config: ConfigFields) -> list[LayoutEntry]:
    """Return the tensors of a published checkpoint, in bfloat16 or as its `quantization_config` stores them."""
    quantization = config.get("quantization_config") or {}
    entries: list[LayoutEntry] = []
    for name, shape in sorted(model_shapes(config).items()):
        if quantization.get("quant_method") == "fp8" and _is_fp8_weight(name, shape):
            entries += _fp8_entries(name, shape)
        elif quantization.get("quant_method") == "mxfp4" and name.endswith("_proj"):
            entries += _mxfp4_entries(name, shape)
        else:
            entries.append(_entry(name, "bfloat16", shape))
    return entries


def model_shapes(config: ConfigFields) -> dict[str, Shape]:
    """Return the shapes of the tensors in files of transformers, and of the layers for multi-token prediction."""
    fields: ConfigFields = dict(config)
    fields.pop("quantization_config", None)
    if fields["model_type"] == "kimi_k2":
        # Its published code is that of DeepSeek-V3.
        fields["model_type"] = "deepseek_v3"
    prediction_layers = range(0)
    if count := fields.pop("num_nextn_predict_layers", 0):
        first = fields["num_hidden_layers"]
        prediction_layers = range(first, first + count)
        # These layers have the parameters of a layer with experts, and some more.
        fields["num_hidden_layers"] = prediction_layers.stop
    shapes = _transformers_shapes(fields)
    for layer in prediction_layers:
        shapes |= _prediction_shapes(f"model.layers.{layer}", shapes["lm_head.weight"])
    return shapes


def _transformers_shapes(config: ConfigFields) -> dict[str, Shape]:
    """Return the shape of each tensor in a file of transformers. No weights are allocated."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    model_type = config.pop("model_type")
    torch_config = AutoConfig.for_model(model_type, **config)
    auto_class = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto_class.from_config(torch_config)
    shapes: dict[str, Shape] = {}
    tied = set(model.all_tied_weights_keys)
    named = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    for name, tensor in to_file_tensors(model, named).items():
        shapes[name] = tuple(tensor.shape)
    return shapes


def _prediction_shapes(layer: str, head: Shape) -> dict[str, Shape]:
    """Return the shapes of the tensors that a layer for multi-token prediction has besides those of a layer."""
    hidden = head[1]
    return {
        f"{layer}.embed_tokens.weight": head,
        f"{layer}.enorm.weight": (hidden,),
        f"{layer}.hnorm.weight": (hidden,),
        f"{layer}.eh_proj.weight": (hidden, 2 * hidden),
        f"{layer}.shared_head.norm.weight": (hidden,),
        f"{layer}.shared_head.head.weight": head,
    }


def _is_fp8_weight(name: str, shape: Shape) -> bool:
    """Return whether DeepSeek's files store a weight in fp8: all matrices of attention and MLPs, without routers."""
    is_in_layer = ".self_attn." in name or ".mlp." in name
    return len(shape) == 2 and is_in_layer and not name.endswith("mlp.gate.weight")


def _fp8_entries(name: str, shape: Shape) -> Iterator[LayoutEntry]:
    rows, columns = shape
    grid = (math.ceil(rows / FP8_BLOCK), math.ceil(columns / FP8_BLOCK))
    yield _entry(name, "float8_e4m3fn", shape)
    yield _entry(f"{name}_scale_inv", "float32", grid)


def _mxfp4_entries(name: str, shape: Shape) -> Iterator[LayoutEntry]:
    """Yield blocks and scales of the experts' weights, which are [E, in, out] in transformers."""
    experts, inputs, outputs = shape
    blocks = inputs // MXFP4_BLOCK
    yield _entry(f"{name}_blocks", "uint8", (experts, outputs, blocks, MXFP4_BLOCK // 2))
    yield _entry(f"{name}_scales", "uint8", (experts, outputs, blocks))


def _entry(name: str, dtype: str, shape: Shape) -> LayoutEntry:
    return name, dtype, shape, math.prod(shape) * itemsize(dtype)


def write_sparse(folder: Path, config: ConfigFields) -> None:
    """Write a checkpoint with real headers over sparse zeros into a new folder."""
    folder.mkdir(parents=True)
    groups = split_into_shards(stored_entries(config), SHARD_NBYTES)
    layouts = lay_out_files([(name, group, None) for name, group in groups])
    for layout in layouts:
        with (folder / layout.name).open("wb") as file:
            file.write(layout.header)
            file.truncate(layout.size)
    (folder / INDEX_FILE).write_bytes(encode_index(layouts))
    (folder / "config.json").write_bytes(json_bytes(config))


def measure_model(work: Path, name: str, meshes: Sequence[str], quantized: str) -> ShapesRow:
    """Measure both commands on a model. Raise SystemExit if `inspect` fails, or if no mesh has a plan."""
    model = work / f"bench-{name}-sparse"
    remove(model)
    write_sparse(model, MODELS[name])
    save_init = (PREP, "save-init", model, "--out", work / "bench-out", "--quantized", quantized)
    errors: list[str] = []
    try:
        inspect = run_checked((PREP, "inspect", model, "--quiet"))
        for mesh in meshes:
            plan = measure((*save_init, "--mesh", mesh, "--dry-run", "--json", "--quiet"))
            if plan.exit_code == 0:
                return _row(name, mesh, inspect, plan)
            errors.append(plan.stderr)
    finally:
        remove(model)
    raise SystemExit(f"{name} has no plan\n{''.join(errors)}")


def _row(name: str, mesh: str, inspect: CommandCost, plan: CommandCost) -> ShapesRow:
    planned = json.loads(plan.stdout)
    return ShapesRow(
        name=name,
        mapping="verbatim" if planned["not_computed"] else "family",
        mesh=mesh,
        nbytes=planned["source"]["bytes"],
        tensors=planned["accounting"]["tensors"],
        inspect=inspect,
        plan=plan,
    )


def shapes_text(rows: Sequence[ShapesRow]) -> str:
    """Return a table with one line per model."""
    header = ("model", "mapping", "mesh", "GB", "tensors", "inspect", "MB", "plan", "MB")
    lines: list[tuple[str, ...]] = []
    for row in rows:
        size = (f"{row.nbytes / GB:,.0f}", f"{row.tensors:,}")
        costs = (*_cells(row.inspect), *_cells(row.plan))
        lines.append((row.name, row.mapping, row.mesh, *size, *costs))
    return format_table(lines, header, right_aligned=header[3:])


def _cells(cost: CommandCost) -> tuple[str, str]:
    """Return the CPU seconds and the peak anonymous memory of a command."""
    return f"{cost.cpu_s:.1f}", f"{cost.peak_nbytes / MB:.0f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the requested models and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.real_shapes", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {', '.join(MODELS)}")
    parser.add_argument(
        "--work", type=Path, required=True, metavar="FOLDER", help="folder for the sparse files"
    )
    parser.add_argument("--mesh", help=f"default: the first with a plan of {', '.join(MESHES)}")
    parser.add_argument("--quantized", choices=("keep", "dequantize"), default="keep")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in MODELS]:
        parser.error(f"no model {unknown[0]}; there are {', '.join(MODELS)}")
    options.work.mkdir(parents=True, exist_ok=True)
    meshes = (options.mesh,) if options.mesh else MESHES
    rows: list[ShapesRow] = []
    try:
        for name in options.names or MODELS:
            rows.append(measure_model(options.work, name, meshes, options.quantized))
            log(f"{name}: {rows[-1].nbytes / GB:,.0f} GB, {rows[-1].mapping}")
    finally:  # print the completed measurements if one fails
        print(shapes_text(rows))


if __name__ == "__main__":
    main()
