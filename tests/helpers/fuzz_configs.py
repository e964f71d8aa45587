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

from tests.helpers.decoders import batch_of, decoder, filled, logits_of
from tests.helpers.fuzz_samples import BASES, LENGTH, Sample, sample
from tests.helpers.torch_decoders import OtherTensors, torch_fresh, torch_logits, torch_model
from trainer.models.errors import PrepError
from trainer.models.parameters import Config

ATOL = 2e-5
ROUNDINGS = 20  # logits may differ by so many times the judge's own rounding error, where that is more than ATOL
ROWS = 2
COLUMNS = ("samples", "equal", "refused", "judge computes", "judge fails", "wrong", "seed")
HEAD = f"{'family':12}" + "".join(f"{name:>16}" for name in COLUMNS)


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a sample and its reason. `judge_computes`: prep refused a config that transformers computes."""

    outcome: Literal["equal", "refused", "judge fails", "wrong"]
    why: str = ""
    judge_computes: bool = False


@dataclass(frozen=True, slots=True)
class Ours:
    """Tensors by their names in files, a batch, and the logits that prep computes."""

    tensors: dict[str, np.ndarray]
    batch: dict[str, np.ndarray]
    logits: np.ndarray


def compared(given: Sample) -> Result:
    """Return the outcome of one sample."""
    try:
        ours = _ours(json.loads(json.dumps(given.config)), given.own_head)
    except PrepError as error:
        return Result("refused", str(error), _judge_computes(given.config))
    except Exception as error:  # any: a user would see "this is a bug in prep"
        return Result("wrong", f"prep raises {type(error).__name__}: {error}")
    try:
        model = torch_model(given.config, ours.tensors)
        wanted = _judge_logits(model, ours.batch)
    except OtherTensors as error:
        return Result("wrong", str(error))
    except Exception as error:  # any: transformers validates little
        return Result("judge fails", f"{type(error).__name__}: {error}")
    return _compared(ours, wanted, model)


def _compared(ours: Ours, wanted: np.ndarray, model: Any) -> Result:
    if not np.isfinite(wanted).all():
        return Result("judge fails", "its logits are not finite")
    error = float(np.abs(wanted - ours.logits).max())
    if error <= ATOL:
        return Result("equal")
    rounding = float(np.abs(_judge_logits(model.double(), ours.batch) - wanted).max())
    why = f"logits differ by {error:.1e}; the judge's own rounding error is {rounding:.1e}"
    return Result("equal" if error <= ROUNDINGS * rounding else "wrong", why)


def _ours(config: Config, own_head: bool) -> Ours:
    tensors, made = filled(config, own_head=own_head), decoder(config, own_head=own_head)
    whole = batch_of(made.model.vocab, ROWS, LENGTH, 1, made.model.traits.encoder is not None)
    batch = {name: whole[name] for name in ("tokens", "source", "present") if name in whole}
    return Ours(tensors, batch, logits_of(made.model, made.params(tensors), batch))


def _judge_logits(model: Any, batch: dict[str, np.ndarray]) -> np.ndarray:
    return torch_logits(model, batch, [LENGTH] * ROWS)


def _judge_computes(config: Config) -> bool:
    """Return whether transformers computes finite logits for a config, with first values of its own."""
    try:
        model = torch_fresh(config)
        batch = batch_of(int(config["vocab_size"]), ROWS, LENGTH, 1, model.config.is_encoder_decoder)
        return bool(np.isfinite(_judge_logits(model, batch)).all())
    except Exception:
        return False


def outcomes(family: str, seed: int, numbers: Iterable[int]) -> Iterator[tuple[int, Sample, Result]]:
    """Yield each sample of a family with its outcome."""
    for number in numbers:
        given = sample(family, seed, number)
        yield number, given, compared(given)


def line(family: str, results: Sequence[Result], seed: int) -> str:
    """Return a row of the table."""
    counts = Counter(result.outcome for result in results)
    shared = sum(result.judge_computes for result in results)
    cells = (len(results), counts["equal"], counts["refused"], shared, counts["judge fails"], counts["wrong"], seed)
    return f"{family:12}" + "".join(f"{cell:>16,}" for cell in cells)


def silence() -> None:
    """Turn off the judge's warnings and progress bars, and leave other cores alone."""
    import torch
    from transformers.utils import logging as judge_logging

    warnings.simplefilter("ignore")
    judge_logging.set_verbosity(logging.CRITICAL)
    judge_logging.disable_progress_bar()
    torch.set_num_threads(1)


def run(family: str, seed: int, numbers: Sequence[int], verbose: bool) -> list[Result]:
    """Print a sample that is wrong, or (`verbose`) not equal, and return the outcomes of all."""
    results = []
    for number, given, result in outcomes(family, seed, numbers):
        results.append(result)
        if result.outcome == "wrong" or (verbose and result.outcome != "equal"):
            shared = " (transformers computes it)" if result.judge_computes else ""
            print(f"{family} {number} of seed {seed}: {result.outcome}{shared}: {result.why}\n  {given}", flush=True)
    return results


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.helpers.fuzz_configs", description="Fuzz configs against the judge."
    )
    parser.add_argument("--family", action="append", choices=[*BASES], help="a family; all by default")
    parser.add_argument("--count", type=int, default=100, help="samples of each family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, help="run this sample alone")
    parser.add_argument("--verbose", action="store_true", help="print every sample that is not equal")
    options = parser.parse_args(arguments)
    silence()
    numbers = range(options.count) if options.number is None else [options.number]
    print(HEAD, flush=True)
    wrong = 0
    for family in options.family or BASES:
        results = run(family, options.seed, numbers, options.verbose)
        wrong += sum(result.outcome == "wrong" for result in results)
        print(line(family, results, options.seed), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
