"""Compare logits of prep and transformers for random configs: they must be equal, or prep must raise a PrepError.

    python -m tests.helpers.fuzz_configs --count 1000 --seed 1 [--family NAME …] [--verbose]

It needs the `parity` extra. It prints a table; the exit code is 1 if a sample is wrong. `--number N` runs one sample.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Literal

import numpy as np

from prepcli.commands.testing.tiny_model import (
    TensorMismatchError,
    model_logits,
    random_batch,
    random_tensors,
    tiny_transformer,
    torch_logits,
    torch_model,
    torch_random_model,
)
from prepcli.core.errors import PrepError
from prepcli.models.parameters import HFConfig, read_size
from tests.helpers.fuzz_samples import BASE_CONFIGS, SEQ_LENGTH, Sample, make_sample

ATOL = 2e-5
# Allowed difference, as a multiple of the rounding error of transformers, if that is above ATOL.
MAX_ROUNDING_ERRORS = 20
BATCH_SIZE = 2
# Samples per child process. A sample leaves up to 190 MB in memory.
CHILD_SAMPLES = 40
# A config may make transformers allocate lists of any length.
CHILD_MEMORY_NBYTES = 10 << 30
COLUMNS = ("samples", "equal", "rejected", "torch computes", "torch fails", "wrong", "seed")
TABLE_HEADER = f"{'family':12}" + "".join(f"{name:>16}" for name in COLUMNS)


@dataclass(frozen=True, slots=True)
class FuzzResult:
    """The outcome of a sample.

    Attributes:
        outcome: "rejected" if prep raises a PrepError, "torch fails" if only transformers fails.
        why: The reason.
        torch_computes: Whether transformers computes a config that prep rejects.
    """

    outcome: Literal["equal", "rejected", "torch fails", "wrong"]
    why: str = ""
    torch_computes: bool = False


@dataclass(frozen=True, slots=True)
class PrepForward:
    """Tensors by their names in files, a batch, and the logits that prep computes."""

    tensors: dict[str, np.ndarray]
    batch: dict[str, np.ndarray]
    logits: np.ndarray


def compare_sample(sample: Sample) -> FuzzResult:
    """Return the outcome of one sample."""
    try:
        forward = _run_prep(json.loads(json.dumps(sample.config)), sample.has_stored_head)
    except PrepError as error:
        return FuzzResult("rejected", str(error), _torch_computes(sample.config))
    except Exception as error:  # a user would see "this is a bug in prep"
        return FuzzResult("wrong", f"prep raises {type(error).__name__}: {error}")
    try:
        model = torch_model(sample.config, forward.tensors)
        expected = _torch_logits(model, forward.batch)
    except TensorMismatchError as error:
        return FuzzResult("wrong", str(error))
    except Exception as error:  # transformers validates few fields
        return FuzzResult("torch fails", f"{type(error).__name__}: {error}")
    return _compare_logits(forward, expected, model)


def _compare_logits(forward: PrepForward, expected: np.ndarray, model: Any) -> FuzzResult:
    """Compare logits, with a tolerance for the rounding of transformers."""
    if not np.isfinite(expected).all():
        return FuzzResult("torch fails", "its logits are not finite")
    error = float(np.abs(expected - forward.logits).max())
    if error <= ATOL:
        return FuzzResult("equal")
    rounding = float(np.abs(_torch_logits(model.double(), forward.batch) - expected).max())
    why = f"logits differ by {error:.1e}; the rounding error of transformers is {rounding:.1e}"
    return FuzzResult("equal" if error <= MAX_ROUNDING_ERRORS * rounding else "wrong", why)


def _run_prep(config: HFConfig, has_stored_head: bool) -> PrepForward:
    """Return the logits of prep for random weights and tokens."""
    tensors = random_tensors(config, has_stored_head=has_stored_head)
    transformer = tiny_transformer(config, has_stored_head=has_stored_head)
    model = transformer.model
    train_batch = random_batch(
        model.true_vocab_size, BATCH_SIZE, SEQ_LENGTH, 1, model.arch_config.encoder is not None
    )
    batch = {
        name: train_batch[name] for name in ("tokens", "source", "present") if name in train_batch
    }
    return PrepForward(
        tensors, batch, model_logits(model, transformer.params_from_tensors(tensors), batch)
    )


def _torch_logits(model: Any, batch: dict[str, np.ndarray]) -> np.ndarray:
    return torch_logits(model, batch, [SEQ_LENGTH] * BATCH_SIZE)


def _torch_computes(config: HFConfig) -> bool:
    """Return whether transformers computes finite logits for a config, with its own initial values."""
    try:
        model = torch_random_model(config)
        batch = random_batch(
            read_size(config, "vocab_size", 1),
            BATCH_SIZE,
            SEQ_LENGTH,
            1,
            model.config.is_encoder_decoder,
        )
        return bool(np.isfinite(_torch_logits(model, batch)).all())
    except Exception:
        return False


def run_chunk(
    family: str, seed: int, numbers: Sequence[int]
) -> list[tuple[int, Sample, FuzzResult]]:
    """Return the number, sample and outcome of each sample of a family, computed in this process."""
    samples = ((number, make_sample(family, seed, number)) for number in numbers)
    return [(number, sample, compare_sample(sample)) for number, sample in samples]


def run_samples(
    family: str, seed: int, numbers: Sequence[int]
) -> Iterator[tuple[int, Sample, FuzzResult]]:
    """Yield the number, sample and outcome of each sample of a family.

    Samples run in child processes of at most `CHILD_SAMPLES` each, because the compiled functions of a sample stay in
    memory.
    """
    chunks = [
        numbers[start : start + CHILD_SAMPLES] for start in range(0, len(numbers), CHILD_SAMPLES)
    ]
    children = ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=prepare_child, max_tasks_per_child=1
    )
    with children:
        for chunk in chunks:
            yield from children.submit(run_chunk, family, seed, chunk).result()


def format_row(family: str, results: Sequence[FuzzResult], seed: int) -> str:
    """Return a row of the table."""
    counts = Counter(result.outcome for result in results)
    torch_computes = sum(result.torch_computes for result in results)
    cells = (
        len(results),
        counts["equal"],
        counts["rejected"],
        torch_computes,
        counts["torch fails"],
        counts["wrong"],
        seed,
    )
    return f"{family:12}" + "".join(f"{cell:>16,}" for cell in cells)


def prepare_child() -> None:
    """Limit the memory of this process, and silence transformers."""
    resource.setrlimit(resource.RLIMIT_DATA, (CHILD_MEMORY_NBYTES, CHILD_MEMORY_NBYTES))
    silence_transformers()


def silence_transformers() -> None:
    """Turn off warnings and progress bars of transformers, and let torch use one thread."""
    import torch
    from transformers.utils import logging as transformers_logging

    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)


def run_family(family: str, seed: int, numbers: Sequence[int], verbose: bool) -> list[FuzzResult]:
    """Run samples, print the wrong ones (or, if verbose, all but the equal ones), and return all results."""
    results = []
    for number, sample, result in run_samples(family, seed, numbers):
        results.append(result)
        if result.outcome == "wrong" or (verbose and result.outcome != "equal"):
            note = " (transformers computes it)" if result.torch_computes else ""
            print(
                f"{family} {number} of seed {seed}: {result.outcome}{note}: {result.why}\n  {sample}",
                flush=True,
            )
    return results


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.helpers.fuzz_configs",
        description="Compare random configs with transformers.",
    )
    parser.add_argument(
        "--family", action="append", choices=[*BASE_CONFIGS], help="a family; all by default"
    )
    parser.add_argument("--count", type=int, default=100, help="samples of each family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, help="run this sample alone")
    parser.add_argument(
        "--verbose", action="store_true", help="print every sample that is not equal"
    )
    options = parser.parse_args(arguments)
    numbers = range(options.count) if options.number is None else [options.number]
    print(TABLE_HEADER, flush=True)
    wrong = 0
    for family in options.family or BASE_CONFIGS:
        results = run_family(family, options.seed, numbers, options.verbose)
        wrong += sum(result.outcome == "wrong" for result in results)
        print(format_row(family, results, options.seed), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
