"""Parametrized cases of which some run only with `pytest -m slow`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")


def slow_except(
    cases: Iterable[Case], fast: Collection[Case] | Callable[[Case], bool]
) -> list[Any]:
    """Mark the cases of a parametrization as slow, except the fast ones.

    A case that is a tuple has one value per argument name.

    Args:
        cases: All cases, in their order.
        fast: The cases that the default suite runs, or a function that returns whether it runs a case.

    Raises:
        ValueError: A case in `fast` is not in `cases`, or no case is fast.
    """
    cases = list(cases)
    is_fast: Callable[[Case], bool] = fast if callable(fast) else lambda case: case in fast
    fast_cases = [case for case in cases if is_fast(case)]
    if not fast_cases or (not callable(fast) and len(fast_cases) < len(fast)):
        raise ValueError(f"fast cases {fast!r} are not among the cases {cases!r}")
    return [_param(case, is_slow=not is_fast(case)) for case in cases]


def _param(case: Any, *, is_slow: bool) -> Any:
    """Return a case as a pytest parameter, marked as slow if it is."""
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=[pytest.mark.slow] * is_slow)
