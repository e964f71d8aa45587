"""One training step of a small LLaMA on the CPU, in prep and in transformers with torch.

`bench.cpu_step` runs `python -m bench.cpu_step_systems` once per system. The process takes one step for each line that
it reads, and prints the step's loss and cost as a line of JSON. That of prep prints its kernel and sizes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainer.recipe import Recipe

CONFIG: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
MAX_STEPS = 1_000_000
LEARNING_RATE, B1, B2, EPS, WEIGHT_DECAY, CLIP_NORM = 1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0

Step = Callable[[np.ndarray], float]  # tokens [B, T] -> mean loss before the step


def write_model(folder: Path, config: Mapping[str, Any]) -> int:
    """Write a random transformers model, and return its parameter count."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.save_pretrained(folder)
    return model.num_parameters()


def batch_tokens(number: int, options: argparse.Namespace) -> np.ndarray:
    """Return the random tokens [B, T] of a step. They are the same for both systems."""
    shape = (options.rows, options.tokens)
    return np.random.default_rng(number).integers(0, options.vocab, shape, dtype=np.int32)


def build_torch_step(options: argparse.Namespace) -> Step:
    """Build the step of transformers and torch, with scaled dot product attention and the fused AdamW."""
    import torch
    from transformers import LlamaForCausalLM

    torch.set_num_threads(options.threads)
    model = LlamaForCausalLM.from_pretrained(
        options.model, attn_implementation="sdpa", dtype=torch.float32
    ).train()
    named = list(model.named_parameters())
    decayed = [
        parameter for name, parameter in named if parameter.ndim == 2 and "embed_tokens" not in name
    ]
    kept = [parameter for name, parameter in named if parameter.ndim != 2 or "embed_tokens" in name]
    groups = [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {"params": kept, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(B1, B2), eps=EPS, fused=True)

    def step(tokens: np.ndarray) -> float:
        optimizer.zero_grad(set_to_none=True)
        inputs = torch.from_numpy(tokens.astype(np.int64))
        loss: Any = model(input_ids=inputs, labels=inputs, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        return loss.item()

    return step


def build_prep_step(options: argparse.Namespace) -> Step:
    """Build the step of prep, compiled as in `prep train`: the state is donated."""
    import jax
    import jax.numpy as jnp

    import prepcli
    from trainer.training.step import init_train_state, train_step

    setup = _prep_setup(options)
    state = init_train_state(prepcli.load_params(str(options.model)), setup)
    compiled: Any = jax.jit(partial(train_step, setup=setup), donate_argnums=0)
    weights = np.ones((options.rows, options.tokens), np.float32)
    weights[:, -1] = 0  # the last token has no target

    def step(tokens: np.ndarray) -> float:
        nonlocal state
        arrays = {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1), "weights": weights}
        state, metrics = compiled(state, jax.tree.map(jnp.asarray, arrays))
        return float(metrics["loss"]) / float(metrics["weight"])

    return step


def make_recipe(options: argparse.Namespace) -> Recipe:
    """Return the recipe of prep's step. Its data does not exist."""
    return Recipe.model_validate(
        {
            "name": "cpu_step",
            "mesh": "1,1,1",
            "model": {
                "path": str(options.model),
                "attention_kernel": options.kernel,
                "q_chunk_size": options.q_chunk,
                "k_chunk_size": options.k_chunk,
                "head_chunk_size": options.head_chunk,
            },
            "data": {"type": "text", "path": ("data.txt",), "seq_length": options.tokens},
            "batch": {"size": options.rows},
            "optimizer": {
                "lr": LEARNING_RATE, "schedule": "constant", "warmup_steps": 0, "b1": B1, "b2": B2, "eps": EPS,
                "weight_decay": WEIGHT_DECAY, "clip_norm": CLIP_NORM,
            },
            "train": {"steps": MAX_STEPS},
        }
    )  # fmt: skip


def _prep_setup(options: argparse.Namespace) -> Any:
    """Return the setup of prep's step, as `prep train` builds it."""
    import jax

    from prepcli.models.mesh import parse_mesh
    from prepcli.models.registry import FAMILIES
    from trainer.distributed.sharding import device_kind, make_sharding_context
    from trainer.nn.model_spec import build_model
    from trainer.planning.step_inputs import run_kernels
    from trainer.training.setup import build_step_setup

    recipe, config = make_recipe(options), json.loads((options.model / "config.json").read_bytes())
    model = build_model(FAMILIES["llama"], config, is_tied=False)
    sharding = make_sharding_context(parse_mesh(recipe.mesh), devices=jax.devices()[:1])
    _, choices = run_kernels(
        recipe, model, sharding.mesh, sharding.rules, device=device_kind(sharding)
    )
    kernel = choices[0]
    setup = build_step_setup(recipe, model, sharding=sharding, kernel=kernel.name, steps=MAX_STEPS)
    forward_config, attention = setup.forward_config, setup.forward_config.attention_options
    tile, head = (
        f"{attention.q_chunk_size} x {attention.k_chunk_size}",
        forward_config.head_chunk_size,
    )
    text = f"prep: {attention.kernel} attention in tiles of {tile}, head in chunks of {head} tokens per sequence"
    print(text, file=sys.stderr)
    return setup


BUILDERS: Mapping[str, Callable[[argparse.Namespace], Step]] = {
    "prep": build_prep_step,
    "torch": build_torch_step,
}


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a step: its batch, and prep's kernel and chunk sizes."""
    parser.add_argument(
        "--rows", type=int, default=8, help="sequences of a batch (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=512, help="tokens of a sequence (default: %(default)s)"
    )
    parser.add_argument(
        "--kernel", default="auto", help="prep's attention kernel (default: %(default)s)"
    )
    parser.add_argument("--q-chunk", type=int, help="queries of a tile (default: chosen for CPUs)")
    parser.add_argument("--k-chunk", type=int, help="keys of a tile (default: chosen for CPUs)")
    parser.add_argument(
        "--head-chunk", type=int, help="`model.head_chunk_size` (default: chosen for CPUs)"
    )


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options of one system's process."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu_step_systems")
    parser.add_argument("system", choices=BUILDERS)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--threads", type=int, required=True, help="cores to use")
    parser.add_argument("--vocab", type=int, required=True, help="vocabulary size")
    add_step_options(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Take one step per line of standard input."""
    options = parse_options(arguments)
    # XLA counts the cores when it starts, so they are limited before.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    step = BUILDERS[options.system](options)
    for number, _ in enumerate(sys.stdin):
        tokens = batch_tokens(number, options)
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        loss = step(tokens)
        cost = {
            "loss": loss,
            "wall_s": time.perf_counter() - wall_s,
            "cpu_s": time.process_time() - cpu_s,
        }
        print(json.dumps(cost), flush=True)


if __name__ == "__main__":
    main()
