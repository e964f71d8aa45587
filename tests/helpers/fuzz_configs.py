"""Compare logits of prep and transformers for random configs: prep has to compute the same, or refuse with a PrepError.

    python -m tests.helpers.fuzz_configs --count 1000 --seed 1 [--family NAME …] [--verbose]

Needs the `parity` extra. Prints a table; exit code 1 if a sample is wrong. `--number N` runs that sample alone.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tests.helpers.fuzz_samples import BASE_CONFIGS, SEQ_LENGTH, Sample, make_sample
from tests.helpers.tiny_transformers import model_logits, random_batch, random_tensors, tiny_transformer
from tests.helpers.torch_transformers import TensorMismatchError, torch_logits, torch_model, torch_random_model
from trainer.models.errors import PrepError
from trainer.models.parameters import HFConfig

ATOL = 2e-5
MAX_ROUNDING_ERRORS = (
    20  # logits may differ by so many times the judge's own rounding error, where that is more than ATOL
)
BATCH_SIZE = 2
COLUMNS = ("samples", "equal", "refused", "judge computes", "judge fails", "wrong", "seed")
TABLE_HEADER = f"{'family':12}" + "".join(f"{name:>16}" for name in COLUMNS)


@dataclass(frozen=True, slots=True)
class FuzzResult:
    """The outcome of a sample and its reason. `judge_computes`: prep refused a config that transformers computes."""

    outcome: Literal["equal", "refused", "judge fails", "wrong"]
    why: str = ""
    reference_computes: bool = False


@dataclass(frozen=True, slots=True)
class PrepForward:
    """Tensors by their names in files, a batch, and the logits that prep computes."""

    tensors: dict[str, np.ndarray]
    batch: dict[str, np.ndarray]
    logits: np.ndarray


def compare_sample(given: Sample) -> FuzzResult:
    """Return the outcome of one sample."""
    try:
        ours = _run_prep(json.loads(json.dumps(given.config)), given.own_head)
    except PrepError as error:
        return FuzzResult("refused", str(error), _reference_computes(given.config))
    except Exception as error:  # any: a user would see "this is a bug in prep"
        return FuzzResult("wrong", f"prep raises {type(error).__name__}: {error}")
    try:
        model = torch_model(given.config, ours.tensors)
        wanted = _reference_logits(model, ours.batch)
    except TensorMismatchError as error:
        return FuzzResult("wrong", str(error))
    except Exception as error:  # any: transformers validates little
        return FuzzResult("judge fails", f"{type(error).__name__}: {error}")
    return _compare_logits(ours, wanted, model)


def _compare_logits(ours: PrepForward, wanted: np.ndarray, model: Any) -> FuzzResult:
    if not np.isfinite(wanted).all():
        return FuzzResult("judge fails", "its logits are not finite")
    error = float(np.abs(wanted - ours.logits).max())
    if error <= ATOL:
        return FuzzResult("equal")
    rounding = float(np.abs(_reference_logits(model.double(), ours.batch) - wanted).max())
    why = f"logits differ by {error:.1e}; the judge's own rounding error is {rounding:.1e}"
    return FuzzResult("equal" if error <= MAX_ROUNDING_ERRORS * rounding else "wrong", why)


def _run_prep(config: HFConfig, own_head: bool) -> PrepForward:
    tensors, made = random_tensors(config, has_stored_head=own_head), tiny_transformer(config, has_stored_head=own_head)
    whole = random_batch(
        made.model.true_vocab_size, BATCH_SIZE, SEQ_LENGTH, 1, made.model.arch_config.encoder is not None
    )
    batch = {name: whole[name] for name in ("tokens", "source", "present") if name in whole}
    return PrepForward(tensors, batch, model_logits(made.model, made.params_from_tensors(tensors), batch))


def _reference_logits(model: Any, batch: dict[str, np.ndarray]) -> np.ndarray:
    return torch_logits(model, batch, [SEQ_LENGTH] * BATCH_SIZE)


def _reference_computes(config: HFConfig) -> bool:
    """Return whether transformers computes finite logits for a config, with first values of its own."""
    try:
        model = torch_random_model(config)
        batch = random_batch(int(config["vocab_size"]), BATCH_SIZE, SEQ_LENGTH, 1, model.config.is_encoder_decoder)
        return bool(np.isfinite(_reference_logits(model, batch)).all())
    except Exception:
        return False


def run_samples(family: str, seed: int, numbers: Iterable[int]) -> Iterator[tuple[int, Sample, FuzzResult]]:
    """Yield each sample of a family with its outcome."""
    for number in numbers:
        given = make_sample(family, seed, number)
        yield number, given, compare_sample(given)


def format_row(family: str, results: Sequence[FuzzResult], seed: int) -> str:
    """Return a row of the table."""
    counts = Counter(result.outcome for result in results)
    shared = sum(result.reference_computes for result in results)
    cells = (len(results), counts["equal"], counts["refused"], shared, counts["judge fails"], counts["wrong"], seed)
    return f"{family:12}" + "".join(f"{cell:>16,}" for cell in cells)


def silence_reference() -> None:
    """Turn off the judge's warnings and progress bars, and leave other cores alone."""
    import torch
    from transformers.utils import logging as judge_logging

    warnings.simplefilter("ignore")
    judge_logging.set_verbosity(logging.CRITICAL)
    judge_logging.disable_progress_bar()
    torch.set_num_threads(1)


def run_family(family: str, seed: int, numbers: Sequence[int], verbose: bool) -> list[FuzzResult]:
    """Print a sample that is wrong, or (`verbose`) not equal, and return the outcomes of all."""
    results = []
    for number, given, result in run_samples(family, seed, numbers):
        results.append(result)
        if result.outcome == "wrong" or (verbose and result.outcome != "equal"):
            shared = " (transformers computes it)" if result.reference_computes else ""
            print(f"{family} {number} of seed {seed}: {result.outcome}{shared}: {result.why}\n  {given}", flush=True)
    return results


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.helpers.fuzz_configs", description="Fuzz configs against the judge."
    )
    parser.add_argument("--family", action="append", choices=[*BASE_CONFIGS], help="a family; all by default")
    parser.add_argument("--count", type=int, default=100, help="samples of each family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, help="run this sample alone")
    parser.add_argument("--verbose", action="store_true", help="print every sample that is not equal")
    options = parser.parse_args(arguments)
    silence_reference()
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
