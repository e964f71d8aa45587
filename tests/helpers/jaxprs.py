"""The equations of traced functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr


def walk_equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield all equations of a jaxpr and of the jaxprs in their parameters."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, ClosedJaxpr | Jaxpr):
                    yield from walk_equations(
                        inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
                    )
