"""One training step of a LLaMA on the CPU, in prep and in transformers with torch.

`bench.cpu_step` runs `python -m bench.cpu_step_systems` once per system. The process answers each line that it reads
with a line of JSON: `step` with the loss and the cost of a step, `rates` with the speed of matrix products, and
`profile` with the time of each function in a step (prep only). That of prep prints its kernel and sizes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.step_profile import profile_program
from trainer.recipe import Recipe

CONFIG: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
# Changes of CONFIG by the size of the model. `1b-layer` is one of the 16 layers of a model of 1 B parameters, with its
# embedding and its head.
SIZES: Mapping[str, Mapping[str, Any]] = {
    "10m": {},
    "100m": {
        "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 12,
    },
    "1b-layer": {
        "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 1,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
}  # fmt: skip
SQUARE_SIZE = 2048  # rows and columns of the large product
RATE_S = 0.3  # seconds in which a product is repeated
MAX_STEPS = 1_000_000
LEARNING_RATE, B1, B2, EPS, WEIGHT_DECAY, CLIP_NORM = 1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0


@dataclass(frozen=True, slots=True)
class SystemStep:
    """The step of a system."""

    run: Callable[[np.ndarray], float]  # tokens [B, T] -> mean loss before the step
    program: Callable[[], str] = (
        str  # Returns the text of the compiled step, or "" if there is none
    )


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


def build_torch_step(options: argparse.Namespace) -> SystemStep:
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

    return SystemStep(step)


def build_prep_step(options: argparse.Namespace) -> SystemStep:
    """Build the step of prep, compiled as in `prep train`: the state is donated."""
    import jax
    import jax.numpy as jnp

    import prepcli
    from trainer.training.step import init_train_state, train_step

    setup = _prep_setup(options)
    state = init_train_state(prepcli.load_params(str(options.model)), setup)
    jitted: Any = jax.jit(partial(train_step, setup=setup), donate_argnums=0)
    compiled: Any = None
    weights = np.ones((options.rows, options.tokens), np.float32)
    weights[:, -1] = 0  # the last token has no target

    def step(tokens: np.ndarray) -> float:
        nonlocal state, compiled
        arrays = {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1), "weights": weights}
        batch = jax.tree.map(jnp.asarray, arrays)
        if compiled is None:
            compiled = jitted.lower(state, batch).compile()
        state, metrics = compiled(state, batch)
        return float(metrics["loss"]) / float(metrics["weight"])

    return SystemStep(step, lambda: compiled.as_text())


def weight_products(config: Mapping[str, Any]) -> Counter[tuple[int, int]]:
    """Return the widths (inputs, outputs) of the weights of a LLaMA, and how many weights have them.

    The three products of a training step with a weight have the same widths in another order, so inputs and outputs may
    change places.
    """
    width, hidden = config["hidden_size"], config["intermediate_size"]
    kv_width = width // config["num_attention_heads"] * config["num_key_value_heads"]
    counts = Counter({(width, config["vocab_size"]): 1})
    for outputs, count in ((width, 2), (kv_width, 2), (hidden, 3)):
        counts[width, outputs] += count * config["num_hidden_layers"]
    return counts


def product_rates(system: str, options: argparse.Namespace) -> dict[str, float]:
    """Measure operations per CPU second: of a large square product, and of the products of a step with its weights."""
    config = json.loads((options.model / "config.json").read_bytes())
    num_tokens = options.rows * options.tokens
    best_s = BEST_SECONDS[system]
    seconds = operations = 0.0
    for (inputs, outputs), count in weight_products(config).items():
        # y = x W^T, dx = dy W and dW = dy^T x
        for rows, summed, columns in (
            (num_tokens, inputs, outputs),
            (num_tokens, outputs, inputs),
            (outputs, num_tokens, inputs),
        ):
            operations += count * 2 * rows * summed * columns
            seconds += count * best_s(rows, summed, columns)
    square_s = best_s(SQUARE_SIZE, SQUARE_SIZE, SQUARE_SIZE)
    return {"square": 2 * SQUARE_SIZE**3 / square_s, "products": operations / seconds}


def _best_cpu_s(multiply: Callable[[], object]) -> float:
    """Return the CPU seconds of the fastest of several calls."""
    multiply()
    seconds: list[float] = []
    end_s = time.perf_counter() + RATE_S
    while time.perf_counter() < end_s:
        start_s = time.process_time()
        multiply()
        seconds.append(time.process_time() - start_s)
    return min(seconds)


def _torch_product_s(rows: int, summed: int, columns: int) -> float:
    import torch

    left, right = torch.randn(rows, summed), torch.randn(summed, columns)
    output = torch.empty(rows, columns)
    return _best_cpu_s(lambda: torch.mm(left, right, out=output))


def _jax_product_s(rows: int, summed: int, columns: int) -> float:
    import jax

    key = jax.random.key(0)
    left = jax.random.normal(key, (rows, summed))
    right = jax.random.normal(key, (summed, columns))
    multiply = jax.jit(jax.numpy.matmul)
    return _best_cpu_s(lambda: multiply(left, right).block_until_ready())


BEST_SECONDS: Mapping[str, Callable[[int, int, int], float]] = {
    "prep": _jax_product_s,
    "torch": _torch_product_s,
}


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


BUILDERS: Mapping[str, Callable[[argparse.Namespace], SystemStep]] = {
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
    for number, line in enumerate(sys.stdin):
        match line.strip():
            case "rates":
                answer: Any = product_rates(options.system, options)
            case "profile":
                run = partial(step.run, batch_tokens(number, options))
                answer = profile_program(step.program(), run)
            case _:
                answer = step_cost(step, batch_tokens(number, options))
        print(json.dumps(answer), flush=True)


def step_cost(step: SystemStep, tokens: np.ndarray) -> dict[str, float]:
    """Take a step, and return its loss and cost."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    loss = step.run(tokens)
    return {
        "loss": loss,
        "wall_s": time.perf_counter() - wall_s,
        "cpu_s": time.process_time() - cpu_s,
    }


if __name__ == "__main__":
    main()
