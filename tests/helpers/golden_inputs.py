"""Inputs of the golden outputs: small checkpoints of every format, with equal bytes on every machine.

Values are integer patterns or come from files of `tests/golden`. Files are written with the safetensors package, with
`pickle_builder` or as plain bytes, so that no input depends on the internals of prep. All files get the same time,
because a manifest records the times of its sources.
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import struct
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests.helpers.archives import extract_all
from tests.helpers.hf_folders import write_hf_folder
from tests.helpers.pickle_builder import make_torch_file
from tests.helpers.quantized_formats import FORMATS
from tests.helpers.run_cli import run_ok

GOLDEN = Path(__file__).parents[1] / "golden"
# Time of all inputs, in seconds since 1970.
TIME_S = 1_700_000_000
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
Tensors = dict[str, np.ndarray]
Shapes = Mapping[str, Sequence[int]]

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 131, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 131, "n_embd": 32, "n_layer": 3,
    "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
# Projections of LLaMA's layers, in multiples of (hidden, heads, kv heads, MLP), and Meta's names of them.
META_NAMES = {
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
WORDS = [f"w{number}" for number in range(131)]
# Tensors of the model that `write_verbatim` writes, stacked and transposed.
STACKED_MAP = """\
size layers = 4
size vocab = 37
size embed = 24
size inner = 40
drop table
drop scale
tok: embed vocab <- embed.weight: vocab embed
gain: embed <- norm.gain: embed
mix: layers inner embed <- blocks.{layers}.mix.weight: embed inner
bias: layers inner <- blocks.{layers}.mix.bias: inner
"""
RECIPE = """\
seed = 3
mesh = "1,8,1"
[model]
path = "llama-init"
[data]
type = "text"
path = "text.txt"
seq_length = 16
tokenizer = "words/tokenizer.json"
[batch]
size = 8
[optimizer]
lr = 1e-2
[train]
steps = 2
log_every = 1
[checkpoint]
every = 1
"""


def pattern(name: str, shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    """Return values in [-1, 1) that depend on the name and the position alone, exact in float16."""
    codes = np.arange(math.prod(shape), dtype=np.uint32) * np.uint32(2654435761)
    codes = (codes + np.uint32(zlib.crc32(name.encode()))) >> np.uint32(21)
    return ((codes.astype(np.float32) - 1024) / 1024).astype(dtype).reshape(shape)


def fill(shapes: Shapes, dtype: Any = np.float32) -> Tensors:
    """Return a tensor of each name and shape."""
    return {name: pattern(name, shape, dtype) for name, shape in shapes.items()}


def llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a LLaMA with an untied head."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    mlp = config["intermediate_size"]
    kv = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    layer = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden), "mlp.down_proj": (hidden, mlp),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    for number in range(config["num_hidden_layers"]):
        for name, shape in layer.items():
            shapes[f"model.layers.{number}.{name}.weight"] = shape
    return shapes


def gpt2_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a GPT-2 with a tied head; matrices of Conv1D are [in, out]."""
    hidden = config["n_embd"]
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (config["vocab_size"], hidden),
        "transformer.wpe.weight": (config["n_positions"], hidden),
        "transformer.ln_f.weight": (hidden,),
        "transformer.ln_f.bias": (hidden,),
    }
    layer = {
        "attn.c_attn": (hidden, 3 * hidden), "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, 4 * hidden), "mlp.c_proj": (4 * hidden, hidden),
        "ln_1": (hidden,), "ln_2": (hidden,),
    }  # fmt: skip
    for number in range(config["n_layer"]):
        for name, shape in layer.items():
            shapes[f"transformer.h.{number}.{name}.weight"] = shape
            shapes[f"transformer.h.{number}.{name}.bias"] = shape[-1:]
    return shapes


def write_model(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], files: int = 2
) -> None:
    """Write a Hugging Face folder of one or several safetensors files."""
    names = list(tensors)
    parts: dict[str, Tensors] = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        first, last = number * len(names) // files, (number + 1) * len(names) // files
        key = "model.safetensors" if files == 1 else name
        parts[key] = {tensor: tensors[tensor] for tensor in names[first:last]}
    write_hf_folder(folder, parts, config)


def write_llama(folder: Path, dtype: Any = np.float32, files: int = 2, **changes: Any) -> None:
    """Write a LLaMA with grouped heads and an odd vocabulary."""
    config = LLAMA | {"torch_dtype": np.dtype(dtype).name} | changes
    write_model(folder, config, fill(llama_shapes(config), dtype), files)


def write_gpt2(folder: Path) -> None:
    """Write a GPT-2 with a tied head and the mask buffers of old files."""
    tensors = fill(gpt2_shapes(GPT2))
    for number in range(GPT2["n_layer"]):
        mask = np.tril(np.ones((64, 64), bool))
        tensors[f"transformer.h.{number}.attn.bias"] = mask[None, None]
    write_model(folder, GPT2, tensors)


def write_decoder(folder: Path, name: str) -> None:
    """Write the model of a file in `tests/golden/decoders`."""
    with np.load(GOLDEN / f"decoders/{name}.npz") as file:
        config = json.loads(str(file["config"]))
        keys = [key for key in file.files if key.startswith("tensor:")]
        tensors = {key.removeprefix("tensor:"): file[key] for key in keys}
    write_model(folder, config | {"torch_dtype": "float32"}, tensors)


def write_prediction(folder: Path) -> None:
    """Write a model with a layer for multi-token prediction."""
    write_decoder(folder, "glm4_moe")
    config = json.loads((folder / "config.json").read_text())
    prefix = f"model.layers.{config['num_hidden_layers']}."
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    extra = fill(
        {f"{prefix}eh_proj.weight": (3, 5), f"{prefix}mlp.experts.0.up_proj.weight": (4, 2)}
    )
    name = "model-00003-of-00003.safetensors"
    save_file(extra, folder / name)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= dict.fromkeys(extra, name)
    path.write_text(json.dumps(index))


def write_towers(folder: Path, name: str) -> None:
    """Write a multimodal model of `tests/golden/towers`."""
    golden = json.loads((GOLDEN / f"towers/{name}.json").read_text())
    write_model(folder, golden["config"], fill(golden["shapes"]), files=1)
    (folder / "preprocessor_config.json").write_text('{"image_mean":  [0.5]}')


def write_verbatim(folder: Path) -> None:
    """Write a small model of an unknown type: numbered layers, a buffer of integers, and a scalar."""
    shapes: dict[str, Sequence[int]] = {"embed.weight": (37, 24), "norm.gain": (24,), "scale": ()}
    for number in range(4):
        shapes[f"blocks.{number}.mix.weight"] = (24, 40)
        shapes[f"blocks.{number}.mix.bias"] = (40,)
    tensors = fill(shapes, BFLOAT16)
    tensors["table"] = np.arange(12, dtype=np.int64).reshape(3, 4)
    write_model(folder, {"model_type": "unheard_of", "vocab_size": 37}, tensors)


def write_quantized(folder: Path, name: str) -> None:
    """Write a LLaMA with quantised projections, as a format of `quantized_formats`."""
    quantised, rng = FORMATS[name], np.random.default_rng(1)
    stored: Tensors = {}
    for tensor, shape in llama_shapes(LLAMA).items():
        if not tensor.endswith("_proj.weight"):
            stored[tensor] = pattern(tensor, shape, BFLOAT16)
            continue
        parts, _ = quantised.quantize(rng, (shape[0], shape[1]))
        for end, part in parts.items():
            stored[tensor.removesuffix("weight") + end] = np.ascontiguousarray(part)
    settings = {"torch_dtype": "bfloat16", "quantization_config": dict(quantised.settings)}
    write_model(folder, LLAMA | settings, stored)


def write_mxfp4(folder: Path) -> None:
    """Write a model of an unknown type with MXFP4 experts."""
    codes = np.random.default_rng(0)
    stored: Tensors = {"model.norm.weight": np.ones(64, np.float32)}
    for number in range(2):
        for name, rows, columns in (("gate_up_proj", 96, 64), ("down_proj", 64, 96)):
            prefix = f"model.layers.{number}.mlp.experts.{name}_"
            shape = (4, rows, columns // 32)
            stored[f"{prefix}blocks"] = codes.integers(0, 256, (*shape, 16), dtype=np.uint8)
            stored[f"{prefix}scales"] = codes.integers(100, 140, shape, dtype=np.uint8)
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config = {"model_type": "unheard_of", "quantization_config": settings}
    write_model(folder, config, stored)


def write_adapter(folder: Path) -> None:
    """Write a PEFT adapter of two projections of the LLaMA."""
    shapes: dict[str, Sequence[int]] = {}
    for number in range(LLAMA["num_hidden_layers"]):
        for module, width in (("self_attn.q_proj", 32), ("mlp.down_proj", 48)):
            prefix = f"base_model.model.model.layers.{number}.{module}"
            shapes[f"{prefix}.lora_A.weight"] = (3, width)
            shapes[f"{prefix}.lora_B.weight"] = (32, 3)
    folder.mkdir()
    save_file(fill(shapes), folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA", "r": 3, "lora_alpha": 7.0, "bias": "none",
        "target_modules": ["down_proj", "q_proj"],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token per word."""
    model = {
        "type": "WordLevel",
        "vocab": {word: number for number, word in enumerate(WORDS)},
        "unk_token": WORDS[0],
    }
    document = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "tokenizer_config.json").write_text('{"unk_token": "w0"}')


def write_words(folder: Path) -> None:
    """Write the LLaMA with a tokenizer."""
    write_llama(folder)
    write_tokenizer(folder)


def write_pieces(folder: Path) -> None:
    """Write the LLaMA with a SentencePiece model in place of a tokenizer.json: `sentencepiece_model.proto` by hand."""
    write_llama(folder)
    model = b""
    for number, word in enumerate(["<unk>", "<s>", "</s>", *WORDS[3:]]):
        # Field 1 is the text, field 2 the score as float32, field 3 the type: 1 normal, 2 unknown, 3 control.
        kind = 2 if number == 0 else 3 if number < 3 else 1
        piece = b"\x0a" + bytes([len(word)]) + word.encode()
        piece += b"\x15" + struct.pack("<f", -number) + bytes([0x18, kind])
        model += b"\x0a" + bytes([len(piece)]) + piece
    # Field 2 is the specification of the trainer: model type 2 is BPE, and the vocabulary has 131 pieces.
    trainer = bytes([0x18, 2, 0x20, 0x83, 0x01])
    # Field 3 is the specification of the normalizer: a name, and no space before a text.
    normalizer = b"\x0a\x08identity" + bytes([0x18, 0])
    model += b"\x12" + bytes([len(trainer)]) + trainer
    model += b"\x1a" + bytes([len(normalizer)]) + normalizer
    (folder / "tokenizer.model").write_bytes(model)
    settings = {"tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_recipe(path: Path) -> None:
    """Write a recipe, and beside it its text, model and tokenizer."""
    provide("words")
    provide("llama-init")
    Path("text.txt").write_text(" ".join(WORDS[number * number % 131] for number in range(1500)))
    path.write_text(RECIPE)


def write_torch(folder: Path, files: int) -> None:
    """Write the LLaMA as PyTorch files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | {"torch_dtype": "bfloat16"}))
    tensors = fill(llama_shapes(LLAMA), BFLOAT16)
    if files == 1:
        (folder / "pytorch_model.bin").write_bytes(make_torch_file(tensors))
        return
    names = list(tensors)
    places: dict[str, str] = {}
    for number in range(files):
        part = names[number::files]
        file = f"pytorch_model-{number + 1:05}-of-{files:05}.bin"
        (folder / file).write_bytes(make_torch_file({name: tensors[name] for name in part}))
        places |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def write_meta(folder: Path) -> None:
    """Write the LLaMA as a file of Meta's own format."""
    names = {
        "model.embed_tokens.weight": "tok_embeddings.weight",
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "output.weight",
    }
    tensors: Tensors = {}
    for name, value in fill(llama_shapes(LLAMA), BFLOAT16).items():
        if name.startswith("model.layers."):
            _, _, number, rest = name.split(".", 3)
            part = META_NAMES[rest.removesuffix(".weight")]
            tensors[f"layers.{number}.{part}.weight"] = value
        else:
            tensors[names[name]] = value
    params = {
        "dim": 32, "n_layers": 3, "n_heads": 8, "n_kv_heads": 4, "vocab_size": -1,
        "multiple_of": 48, "ffn_dim_multiplier": 0.1, "norm_eps": 1e-5,
    }  # fmt: skip
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(params))
    (folder / "consolidated.00.pth").write_bytes(make_torch_file(tensors))


GGUF_LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
GGUF_UINT32, GGUF_FLOAT32, GGUF_STRING, GGUF_Q8_0 = 4, 6, 8, 8


def _gguf_text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _gguf_field(key: str, value: Any) -> bytes:
    """Encode a metadata field of a string, an integer or a float."""
    if isinstance(value, str):
        return _gguf_text(key) + struct.pack("<I", GGUF_STRING) + _gguf_text(value)
    if isinstance(value, int):
        return _gguf_text(key) + struct.pack("<II", GGUF_UINT32, value)
    return _gguf_text(key) + struct.pack("<If", GGUF_FLOAT32, value)


def write_gguf(path: Path) -> None:
    """Write the LLaMA as GGUF version 3: matrices as Q8_0 (a float16 scale per 32 codes), norms as float32."""
    fields: dict[str, Any] = {
        "general.architecture": "llama", "llama.block_count": 3, "llama.embedding_length": 32,
        "llama.feed_forward_length": 64, "llama.attention.head_count": 8, "llama.attention.head_count_kv": 4,
        "llama.context_length": 64, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0, "llama.vocab_size": 131,
    }  # fmt: skip
    shapes = llama_shapes(LLAMA | {"intermediate_size": 64})
    infos, data = b"", b""
    for name, shape in shapes.items():
        stored = GGUF_NAMES.get(name, "")
        if not stored:
            _, _, number, rest = name.split(".", 3)
            stored = f"blk.{number}.{GGUF_LAYER[rest.removesuffix('.weight')]}.weight"
        if len(shape) == 1:
            kind, payload = 0, pattern(name, shape).tobytes()
        else:
            codes = (pattern(name, shape) * 127).astype(np.int8).reshape(-1, 32)
            scales = pattern(f"{name} scales", (len(codes), 1), np.float16)
            kind = GGUF_Q8_0
            payload = np.hstack([scales.view(np.int8), codes]).tobytes()
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        infos += _gguf_text(stored) + dims + struct.pack("<IQ", kind, len(data))
        data += payload + bytes(-len(payload) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(fields))
    head += b"".join(_gguf_field(key, value) for key, value in fields.items()) + infos
    path.write_bytes(head + bytes(-len(head) % 32) + data)


def write_run(folder: Path) -> None:
    """Extract a finished training run with its start from `tests/golden/interrupted.tar.gz`."""
    with tarfile.open(GOLDEN / "interrupted.tar.gz") as archive:
        extract_all(archive, Path("interrupted"))
    shutil.copytree("interrupted/whole/run", folder)
    for name in ("model", "init"):
        shutil.copytree(f"interrupted/{name}", name)
        set_times(Path(name))
    shutil.rmtree("interrupted")


def copy_golden(folder: Path, path: str) -> None:
    """Copy a file or a folder of `tests/golden`."""
    source = GOLDEN / path
    if source.is_dir():
        shutil.copytree(source, folder)
    else:
        shutil.copyfile(source, folder)


Writer = Callable[[Path], object]
WRITERS: dict[str, Writer] = {
    "llama": write_llama,
    "llama-bf16": functools.partial(write_llama, dtype=BFLOAT16, files=1),
    "llama-fp16": functools.partial(write_llama, dtype=np.float16, files=3),
    "gpt2": write_gpt2,
    **{name: functools.partial(write_decoder, name=name) for name in (
        "gpt_neo", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "t5", "mamba2",
        "gemma2", "gemma3_text", "qwen2", "qwen3", "phi3", "gpt_neox", "llama4_text",
    )},
    "prediction": write_prediction,
    "llava": functools.partial(write_towers, name="llava"),
    "qwen3_vl": functools.partial(write_towers, name="qwen3_vl"),
    "verbatim": write_verbatim,
    **{f"q-{name}": functools.partial(write_quantized, name=name) for name in FORMATS},
    "q-mxfp4": write_mxfp4,
    "adapter": write_adapter,
    "words": write_words,
    "tokens.txt": lambda path: path.write_text("<think>\nw1w2\n<end>\n"),
    "recipe.toml": write_recipe,
    "stacked.map": lambda path: path.write_text(STACKED_MAP),
    "pieces": write_pieces,
    "torch": functools.partial(write_torch, files=1),
    "torch-sharded": functools.partial(write_torch, files=2),
    "meta": write_meta,
    "model.gguf": write_gguf,
    "run": write_run,
    "flax": functools.partial(copy_golden, path="flax/llama/flax"),
    "flax-sharded": functools.partial(copy_golden, path="flax/llama/sharded"),
    "flax-neo": functools.partial(copy_golden, path="flax/neo/flax"),
    "flax-t5": functools.partial(copy_golden, path="flax/t5/flax"),
    "easylm-stream": functools.partial(copy_golden, path="flax/llama/streaming_params"),
    "easylm-state": functools.partial(copy_golden, path="flax/llama/streaming_train_state"),
    "easylm-config": functools.partial(copy_golden, path="flax/llama/hf"),
    "dcp-plain": functools.partial(copy_golden, path="torch_dcp"),
}  # fmt: skip
# Inputs that a command makes from another input. The first word after the command is the name of that input.
COMMANDS: dict[str, tuple[str, ...]] = {
    "llama-init": ("save-init", "llama", "--mesh", "1,2,2", "--pad-vocab", "8"),
    "llama-chunks": ("save-init", "llama", "--mesh", "1,2,2", "--pad-vocab", "8", "--storage", "files"),
    "llama-zarr3": ("save-init", "llama", "--storage", "zarr3", "--compress", "zstd", "--no-scan"),
    "words-init": ("save-init", "words", "--mesh", "1,1,2", "--pad-vocab", "8"),
    "pieces-added": ("add-tokens", "pieces", "--tokens", "tokens.txt", "--init", "zeros"),
    "stacked-init": ("save-init", "verbatim", "--map", "stacked.map"),
    "llama.lock": ("lock", "llama"),
    "words-added": ("add-tokens", "words", "--tokens", "tokens.txt"),
    "trained": ("train", "recipe.toml"),
    "trained-lora": ("train", "recipe.toml", "--set", "lora.rank=2"),
    **{f"{name}-init": ("save-init", name) for name in (
        "llama-bf16", "gpt2", "gpt_neo", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "t5",
        "mamba2", "gemma2", "gemma3_text", "qwen2", "qwen3", "prediction", "llava", "qwen3_vl", "verbatim",
        "q-fp8", "q-gptq", "q-nf4", "phi3", "llama4_text",
    )},
    **{f"{tree}-{form}": ("export", "llama-init", "--layout", tree, "--format", form) for tree, form in (
        ("easylm", "stream"), ("hf-flax", "msgpack"), ("maxtext", "orbax"),
        ("maxtext-unscanned", "orbax"), ("tunix", "orbax"), ("levanter", "tensorstore"), ("torchtitan", "dcp"),
    )},
    "hf-dcp": ("export", "llama-init", "--format", "dcp"),
    **{f"state-{tree}": ("export", "run", "--training-state", *words) for tree, words in {
        "trainer": (), "dcp": ("--format", "dcp"), "maxtext": ("--layout", "maxtext"),
        "levanter": ("--layout", "levanter"), "tunix": ("--layout", "tunix"),
    }.items()},
}  # fmt: skip


def set_times(path: Path) -> None:
    """Set the time of a file, or of all files of a folder."""
    for file in [path, *path.rglob("*")]:
        os.utime(file, (TIME_S, TIME_S))


def provide(name: str) -> Path:
    """Return the input of this name in the working folder, and make it if it does not exist."""
    path = Path(name)
    if path.exists():
        return path
    if name in WRITERS:
        WRITERS[name](path)
    else:
        command, source, *words = COMMANDS[name]
        for word in (source, *words):
            if word in WRITERS:
                provide(word)
        provide(source)
        run_ok(command, f"./{source}", *words, "--out", name)
    set_times(path)
    return path
