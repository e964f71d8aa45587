"""Run the checks of a family on a tiny model of a config."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prepcli.commands.testing.checks import CHECKS, Check, FailedCheckError, SkippedCheckError
from prepcli.commands.testing.subject import FamilyUnderTest
from prepcli.commands.testing.tiny_config import scale_down
from prepcli.commands.testing.torch_transformers import INSTALL_HINT, missing_reference_packages
from prepcli.core.errors import PrepError
from prepcli.core.json_types import HFConfig

# An odd number finds more mistakes.
NUM_HEADS = 3
# A mesh divides an even number.
NUM_MESH_HEADS = 4


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check.

    Attributes:
        check: Name of the check.
        outcome: `skipped` if the check cannot run on this machine.
        text: The measured value of a passed check, or why the check failed or was skipped.
    """

    check: str
    outcome: Literal["passed", "failed", "skipped"]
    text: str


def check_family(
    config: HFConfig,
    checks: Sequence[Check] | None = None,
    *,
    on_result: Callable[[CheckResult], None] | None = None,
) -> list[CheckResult]:
    """Check the family of a config on a tiny model, against transformers where it is installed.

    The sizes of a large config are scaled down (see `scale_down`). No file stays.

    Args:
        config: Fields of a config.json.
        checks: Checks to run, of `CHECKS`. None means all.
        on_result: Called with each result as soon as it is known.

    Returns:
        One result for each check, in their order.

    Raises:
        PrepError: The family is not supported, or the config is invalid.
    """
    configs = [scale_down(config, NUM_HEADS), scale_down(config, NUM_MESH_HEADS)]
    results = []
    with tempfile.TemporaryDirectory(prefix="prep-family-") as work:
        for result in run_checks(
            FamilyUnderTest(configs, Path(work)), CHECKS if checks is None else checks
        ):
            results.append(result)
            if on_result is not None:
                on_result(result)
    return results


def run_checks(subject: FamilyUnderTest, checks: Sequence[Check] = CHECKS) -> Iterator[CheckResult]:
    """Run the checks one after another, and yield the result of each."""
    missing = missing_reference_packages()
    for check in checks:
        if check.needs_torch and missing:
            reason = f"{' and '.join(missing)} not installed: {INSTALL_HINT}"
            yield CheckResult(check.name, "skipped", reason)
        else:
            yield _run_check(subject, check)


def _run_check(subject: FamilyUnderTest, check: Check) -> CheckResult:
    try:
        return CheckResult(check.name, "passed", check.run(subject))
    except SkippedCheckError as skipped:
        return CheckResult(check.name, "skipped", str(skipped))
    except Exception as error:
        # A mistake in a family can raise anything.
        expected = isinstance(error, FailedCheckError | PrepError)
        return CheckResult(
            check.name, "failed", str(error) if expected else f"{type(error).__name__}: {error}"
        )
