"""Find the longest context whose training step fits a memory limit, for one layer of LLaMA-7B with embedding and head.

    python -m bench.longest_context --limit-gib 8 --dtype bfloat16

The limit applies to the temporaries of loss and gradients of one sequence in the compiler's plan; parameters, their
gradients and the batch are not counted. The plan is for a CPU, which widens bfloat16 to float32: on a GPU or TPU the
arrays of the layers are half as large.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from bench.compiled_memory import MODEL_SIZES, compile_step
from bench.context import DENSE, GIB, METHODS, TILES, llama, method_config
from bench.evidence import log
from prepcli.console.ui import format_table

ONE_LAYER = MODEL_SIZES["7b"] | {"num_hidden_layers": 1}


def longest_context(fits: Callable[[int], bool], resolution: int = 1024) -> int:
    """Return the largest multiple of `resolution` that fits; 0 if none does.

    Args:
        fits: Whether a number of tokens fits; false for all larger numbers once it is false.
        resolution: Difference between the numbers that are tried last.
    """
    high = resolution
    while fits(high):
        high *= 2
    low = high // 2 if high > resolution else 0
    while high - low > resolution:
        middle = (low + high) // (2 * resolution) * resolution
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def measure_longest(method: str, dtype: str, limit_nbytes: int, resolution: int) -> int:
    """Return the longest context of a method within a limit of temporaries."""
    model, forward_config = llama(ONE_LAYER), method_config(method, dtype)

    def fits(tokens: int) -> bool:
        memory = compile_step(model, forward_config, 1, tokens)
        log(f"{method}, {tokens} tokens: {memory.temp_nbytes / GIB:.2f} GiB, compiled in {memory.compile_s:.1f} s")
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
    parser.add_argument("--limit-gib", type=float, default=8.0, metavar="N", help="GiB of temporaries (default: 8)")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the computation (default: %(default)s)")
    parser.add_argument("--resolution", type=int, default=1024, metavar="N", help="in tokens (default: %(default)s)")
    options = parser.parse_args(arguments)
    limit_nbytes = int(options.limit_gib * GIB)
    longest = {method: measure_longest(method, options.dtype, limit_nbytes, options.resolution) for method in METHODS}
    print(longest_text(longest))


if __name__ == "__main__":
    main()
