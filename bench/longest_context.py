"""Find the longest context whose training step fits a memory limit, for one layer of LLaMA-7B with embedding and head.

    python -m bench.longest_context --limit-gib 8 --dtype bfloat16
    python -m bench.longest_context --limit-gib 8 --dtype bfloat16 --topology v5e:2x2

The limit applies to the temporaries of loss and gradients of one sequence in the compiler's plan. Parameters, their
gradients and the batch are not counted. The plan is for a CPU, which widens bfloat16 to float32, or with `--topology`
for one chip of a TPU, which needs the package libtpu but no TPU.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bench.compiled_memory import compile_step, topology_sharding
from bench.context import DENSE, GIB, METHODS, TILES, llama, method_config
from bench.evidence import log
from bench.model_configs import MODEL_SIZES
from prepcli.core.tables import format_table

if TYPE_CHECKING:
    from trainer.nn.model_spec import ForwardConfig

FIRST_TOKENS = 4096


def longest_context(fits: Callable[[int], bool], resolution: int = 1024) -> int:
    """Return the largest multiple of `resolution` that fits, by doubling and bisection, or 0 if none does.

    Args:
        fits: Returns whether a number of tokens fits. If a number does not fit, no larger number may fit.
        resolution: Step between the tested numbers of tokens at the end of the search. It divides FIRST_TOKENS.
    """
    high = FIRST_TOKENS
    while fits(high):
        high *= 2
    low = high // 2 if high > FIRST_TOKENS else 0
    while high - low > resolution:
        middle = (low + high) // (2 * resolution) * resolution
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def measure_longest(forward_config: ForwardConfig, limit_nbytes: int, resolution: int) -> int:
    """Return the longest context within a limit of temporaries. A step that does not compile exceeds it."""
    import jax

    model = llama(MODEL_SIZES["7b-layer"])

    def fits(tokens: int) -> bool:
        try:
            memory = compile_step(model, forward_config, 1, tokens)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            log(f"{tokens} tokens: more than the memory of the device")
            return False
        log(
            f"{tokens} tokens: {memory.temp_nbytes / GIB:.2f} GiB, compiled in {memory.compile_s:.1f} s"
        )
        return memory.temp_nbytes <= limit_nbytes

    return longest_context(fits, resolution)


def longest_text(tokens_by_method: dict[str, int]) -> str:
    """Return a table of the longest contexts and their ratios to dense and to blockwise attention alone."""
    header = ("method", "tokens", "to dense", "to blockwise attention")
    lines = [
        (
            method,
            f"{tokens:,}",
            *(f"{tokens / max(tokens_by_method[other], 1):.1f}" for other in (DENSE, TILES)),
        )
        for method, tokens in tokens_by_method.items()
    ]
    return format_table(lines, header, right_aligned=header[1:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Search each method's longest context and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.longest_context", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--limit-gib", type=float, default=8.0, metavar="N", help="GiB of temporaries (default: 8)"
    )
    parser.add_argument(
        "--dtype", default="bfloat16", help="dtype of the computation (default: %(default)s)"
    )
    parser.add_argument(
        "--resolution", type=int, default=1024, metavar="N", help="in tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--topology", metavar="NAME", help="compile for a TPU, as v5e:2x2 (default: the CPU)"
    )
    options = parser.parse_args(arguments)
    from trainer.distributed.sharding import ShardingContext

    limit_nbytes, longest = int(options.limit_gib * GIB), dict[str, int]()
    sharding = topology_sharding(options.topology) if options.topology else ShardingContext()
    for method in METHODS:
        log(method)
        forward_config = dataclasses.replace(
            method_config(method, options.dtype), sharding=sharding
        )
        longest[method] = measure_longest(forward_config, limit_nbytes, options.resolution)
    print(longest_text(longest))


if __name__ == "__main__":
    main()
