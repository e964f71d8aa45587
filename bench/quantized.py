"""Decode and export quantised models: time and CPU time against `cp` and the loader of transformers.

    python -m bench.quantized --work FOLDER --format fp8 --gb 2
    python -m bench.quantized --work FOLDER --format mxfp4 --gb 2 --cores 1

Each round runs every command once: `cp` of the quantised model, `prep save-init --quantized dequantize`, `prep export`
of the init to the quantised bytes, and `from_pretrained` of transformers with `dequantize=True`, which decodes to
memory and writes nothing. Needs the `parity` extra, and on disk four times the size of the model for fp8, and seven
times for MXFP4.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from bench.meter import drop_page_cache, measure
from prepcli.core.formatting import format_bytes

VOCABULARY = 1024
SHARD_NBYTES = 10**9
FP8_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
MXFP4_CONFIG = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["self_attn", "router", "embed_tokens", "lm_head"],
    },
}
TRANSFORMERS = """
import sys, transformers
name = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}[sys.argv[2]]
config = getattr(transformers, name)(dequantize=True)
transformers.AutoModelForCausalLM.from_pretrained(
    sys.argv[1], dtype="bfloat16", quantization_config=config
)
"""
Arrays = dict[str, np.ndarray]


def main() -> None:
    """Make the model, run the rounds, and print a line for each command."""
    parser = argparse.ArgumentParser(prog="python -m bench.quantized")
    parser.add_argument("--work", type=Path, required=True, help="folder on the disk to measure")
    parser.add_argument("--format", choices=("fp8", "mxfp4"), default="fp8")
    parser.add_argument("--gb", type=float, default=2.0, help="size of the model")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cores", type=int, default=0, help="cores of each command; default: all")
    options = parser.parse_args()
    if options.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    model = options.work / f"bench-{options.format}-{options.gb:g}"
    if not model.exists():
        make_model(model, options.format, int(options.gb * 1e9))
    commands = make_commands(model, options.format, options.work)
    for number in range(options.rounds):
        for name, command in commands.items():
            run(number, name, command, model)
    for name in ("copy", "init", "exported"):
        shutil.rmtree(options.work / name, ignore_errors=True)


def make_commands(model: Path, format_name: str, work: Path) -> dict[str, list[str]]:
    """Return the commands of a round. The export reads the init that the command before it has written."""
    prep = [sys.executable, "-m", "prepcli"]
    init = str(work / "init")
    save = [*prep, "save-init", str(model), "--quantized", "dequantize", "--out", init]
    return {
        "cp": ["cp", "-r", "--reflink=never", str(model), str(work / "copy")],
        "save-init": [*save, "--overwrite"],
        "export": [*prep, "export", init, "--out", str(work / "exported"), "--overwrite"],
        "transformers": [sys.executable, "-c", TRANSFORMERS, str(model), format_name],
    }


def run(number: int, name: str, command: list[str], model: Path) -> None:
    """Run one command with cold files, and print its cost."""
    shutil.rmtree(model.parent / "copy", ignore_errors=True)
    drop_page_cache([model])
    cost = measure(command)
    if cost.exit_code:
        raise SystemExit(f"{name} failed: {cost.stderr[-2000:]}")
    nbytes = sum(file.stat().st_size for file in model.iterdir())
    peak = format_bytes(cost.peak_nbytes)
    rate = nbytes / cost.cpu_s / 1e6
    print(
        f"round {number}  {name:12}  {cost.wall_s:7.1f} s  {cost.cpu_s:7.1f} CPU s"
        f"  {rate:6.0f} MB of codes per CPU s  peak {peak}",
        flush=True,
    )


def make_model(folder: Path, format_name: str, nbytes: int) -> None:
    """Write a model of random codes with about `nbytes` bytes in files of at most a gigabyte."""
    make_layer: Callable[[int], Iterator[tuple[str, np.ndarray]]] = fp8_layer
    config: dict[str, Any] = dict(FP8_CONFIG)
    if format_name == "mxfp4":
        make_layer = mxfp4_layer
        config = dict(MXFP4_CONFIG)
    folder.mkdir(parents=True)
    width = config["hidden_size"]
    rng = np.random.default_rng(0)
    embedding = rng.standard_normal((VOCABULARY, width)).astype(ml_dtypes.bfloat16)
    tensors: Arrays = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding,
        "model.norm.weight": np.ones(width, ml_dtypes.bfloat16),
    }
    weight_map: dict[str, str] = {}
    total = 0
    layer = 0
    while total < nbytes:
        for name, array in make_layer(layer):
            tensors[f"model.layers.{layer}.{name}"] = array
            total += array.nbytes
        layer += 1
        is_full = sum(array.nbytes for array in tensors.values()) > SHARD_NBYTES
        if is_full or total >= nbytes:
            file_name = f"model-{layer:05}.safetensors"
            save_file(tensors, folder / file_name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file_name)
            tensors = {}
    config["num_hidden_layers"] = layer
    config["layer_types"] = ["full_attention"] * layer
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))


def fp8_layer(layer: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a layer of LLaMA with fp8 projections."""
    rng = np.random.default_rng(layer)
    width, hidden = FP8_CONFIG["hidden_size"], FP8_CONFIG["intermediate_size"]
    shapes = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (width, width))
    shapes = {f"self_attn.{name}": shape for name, shape in shapes.items()}
    shapes |= {f"mlp.{name}": (hidden, width) for name in ("gate_proj", "up_proj")}
    shapes["mlp.down_proj"] = (width, hidden)
    for name, (rows, columns) in shapes.items():
        # Codes 0 to 125 and 128 to 253 are finite, and not subnormal in bfloat16 with these scales.
        codes = rng.integers(0, 126, (rows, columns), dtype=np.uint8)
        codes |= rng.integers(0, 2, (rows, columns), dtype=np.uint8) << 7
        yield f"{name}.weight", codes.view(ml_dtypes.float8_e4m3fn)
        grid = (-(-rows // 128), -(-columns // 128))
        yield f"{name}.weight_scale_inv", rng.uniform(1e-4, 1e-3, grid).astype(np.float32)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.weight", np.ones(width, ml_dtypes.bfloat16)


def mxfp4_layer(layer: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a layer of gpt-oss with MXFP4 experts."""
    rng = np.random.default_rng(layer)
    width, experts = MXFP4_CONFIG["hidden_size"], MXFP4_CONFIG["num_local_experts"]
    for name, rows in (("gate_up_proj", 2 * width), ("down_proj", width)):
        shape = (experts, rows, width // 32)
        yield f"mlp.experts.{name}_blocks", rng.integers(0, 256, (*shape, 16), dtype=np.uint8)
        yield f"mlp.experts.{name}_scales", rng.integers(110, 125, shape, dtype=np.uint8)
        yield f"mlp.experts.{name}_bias", np.zeros((experts, rows), ml_dtypes.bfloat16)
    yield "mlp.router.weight", np.ones((experts, width), ml_dtypes.bfloat16)
    yield "mlp.router.bias", np.zeros(experts, ml_dtypes.bfloat16)
    for name, rows, columns in (
        ("q_proj", 4096, width),
        ("k_proj", 512, width),
        ("v_proj", 512, width),
        ("o_proj", width, 4096),
    ):
        weights = rng.standard_normal((rows, columns), np.float32).astype(ml_dtypes.bfloat16)
        yield f"self_attn.{name}.weight", weights
        yield f"self_attn.{name}.bias", np.zeros(rows, ml_dtypes.bfloat16)
    yield "self_attn.sinks", np.zeros(64, ml_dtypes.bfloat16)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.weight", np.ones(width, ml_dtypes.bfloat16)


if __name__ == "__main__":
    main()
