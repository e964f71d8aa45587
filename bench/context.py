"""Measure memory and time of a LLaMA training step against the context length, as a table and charts.

    python -m bench.context [--tokens 2048,8192,32768,131072] [--svg docs/memory-context.svg]
    python -m bench.context --tokens 512,1024,2048,4096 --seconds 3

The step computes the mean loss of one sequence and its gradients in float32, with `nothing_saveable`. Memory is the
compiler's plan of temporaries for a CPU device: nothing is allocated. `--seconds N` also runs each step N times, and
prints the CPU seconds of the fastest run: they depend less on other load than the wall time does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.compiled_memory import CompiledMemory, compile_step, lower_step
from bench.evidence import log
from bench.model_configs import MODEL_SIZES
from bench.svg_files import svg_file
from prepcli.commands.pages.charts import Curve, line_chart
from prepcli.core.tables import format_table

if TYPE_CHECKING:
    from trainer.nn.model_spec import ForwardConfig, ModelSpec

MIB, GIB, K = 1 << 20, 1 << 30, 1 << 10
DENSE, TILES, ALL_CHUNKS = (
    "dense attention",
    "blockwise attention",
    "blockwise attention, MLP and head",
)
METHODS = (DENSE, TILES, ALL_CHUNKS)
FFN_CHUNK, HEAD_CHUNK, TILE = 1024, 512, 512


@dataclass(frozen=True, slots=True)
class ContextRow:
    """A training step with one context length.

    Attributes:
        method: One of `METHODS`.
        tokens: Tokens of the sequence.
        memory: The compiler's memory plan.
        seconds: CPU seconds of each run after the first, or empty if it did not run.
    """

    method: str
    tokens: int
    memory: CompiledMemory
    seconds: tuple[float, ...] = ()


def method_config(method: str, dtype: str = "float32") -> ForwardConfig:
    """Return the execution options of a method: which of attention, MLP and head compute in chunks."""
    from trainer.nn.model_spec import AttentionOptions, ForwardConfig

    return ForwardConfig(
        dtype=dtype,
        remat_policy="nothing_saveable",
        attention_options=AttentionOptions(
            "reference" if method == DENSE else "blockwise", TILE, TILE
        ),
        ffn_chunk_size=FFN_CHUNK if method == ALL_CHUNKS else -1,
        head_chunk_size=HEAD_CHUNK if method == ALL_CHUNKS else -1,
    )


def llama(config: Mapping[str, Any]) -> ModelSpec:
    """Return the LLaMA of a config."""
    from prepcli.models.registry import FAMILIES
    from trainer.nn.model_spec import build_model

    return build_model(FAMILIES["llama"], config, is_tied=False)


def measure_contexts(
    model: ModelSpec, lengths: Sequence[int], num_runs: int = 0
) -> Iterable[ContextRow]:
    """Compile a step for each method and length, and yield its memory and the seconds of `num_runs` runs."""
    for method in METHODS:
        for tokens in lengths:
            forward_config = method_config(method)
            memory = compile_step(model, forward_config, 1, tokens)
            seconds = (
                tuple(_run_seconds(model, forward_config, tokens, num_runs)) if num_runs else ()
            )
            log(
                f"{method}, {tokens} tokens: {memory.temp_nbytes / MIB:,.0f} MiB, compiled in {memory.compile_s:.1f} s"
            )
            yield ContextRow(method, tokens, memory, seconds)


def _run_seconds(
    model: ModelSpec, forward_config: ForwardConfig, tokens: int, num_runs: int
) -> Iterable[float]:
    """Run a step on random parameters, once to warm up and then `num_runs` times, and yield the CPU seconds of each."""
    import jax
    import jax.numpy as jnp

    from trainer.nn.initialization import init_params

    params = init_params(model, 0)
    ids = jax.random.randint(jax.random.key(0), (1, tokens), 0, model.true_vocab_size, jnp.int32)
    batch = {"tokens": ids, "targets": ids, "weights": jnp.ones(ids.shape, jnp.float32)}
    step = lower_step(model, forward_config, 1, tokens).compile()
    jax.block_until_ready(step(params, batch))
    for _ in range(num_runs):
        start_s = time.process_time()
        jax.block_until_ready(step(params, batch))
        yield time.process_time() - start_s


def context_text(rows: Sequence[ContextRow]) -> str:
    """Return a table with a line per length: MiB of temporaries of each method, and its CPU seconds if it ran."""
    by_place = {(row.tokens, row.method): row for row in rows}
    header = ["tokens", *(f"{method}, MiB" for method in METHODS)]
    header += [f"{method}, CPU s" for method in METHODS] if any(row.seconds for row in rows) else []
    lines: list[list[str]] = []
    for tokens in sorted({row.tokens for row in rows}):
        cells = [by_place.get((tokens, method)) for method in METHODS]
        memory = [f"{cell.memory.temp_nbytes / MIB:,.0f}" if cell else "" for cell in cells]
        seconds = [f"{min(cell.seconds):.2f}" if cell and cell.seconds else "" for cell in cells]
        lines.append([f"{tokens:,}", *memory, *seconds][: len(header)])
    return format_table(lines, header, right_aligned=header)


def context_svg(rows: Sequence[ContextRow]) -> str:
    """Return an SVG of GiB of temporaries over thousands of tokens, with logarithmic axes."""
    curves = []
    for number, method in enumerate(METHODS):
        method_rows = [row for row in rows if row.method == method]
        points = [(row.tokens / K, row.memory.temp_nbytes / GIB) for row in method_rows]
        curves.append(Curve(name=method, points=points, color=number))
    chart = line_chart(
        curves,
        "temporaries of a training step",
        x_name="thousands of tokens",
        y_name="GiB",
        is_log=True,
    )
    return svg_file(chart)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and draw the chart."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.context", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--size",
        choices=MODEL_SIZES,
        default="small",
        help="widths and layers (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens",
        default="2048,4096,8192,16384,32768,65536,131072",
        metavar="N,…",
        help="context lengths (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds", type=int, default=0, metavar="N", help="also run each step N times"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the chart to FILE")
    options = parser.parse_args(arguments)
    lengths = [int(text) for text in options.tokens.split(",")]
    rows = list(measure_contexts(llama(MODEL_SIZES[options.size]), lengths, options.seconds))
    print(context_text(rows))
    if options.svg:
        options.svg.write_text(context_svg(rows))


if __name__ == "__main__":
    main()
