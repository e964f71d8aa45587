"""What a family's layers compute, as choices by name; the same for every parameter and every mesh. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainer.errors import PrepError
from trainer.rope import Rope

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "silu", "swish", "relu")
ALL_BEFORE = 0  # a window without an edge


@dataclass(frozen=True, slots=True)
class Traits:
    """The choices of a decoder whose blocks are x + attention(norm x), then x + feed-forward(norm x).

    windows: of each layer how many positions a token sees, itself included; ALL_BEFORE: all up to it.
    """

    norm: Literal["layer", "rms"]
    norm_eps: float
    activation: str
    gated: bool
    score_scale: float  # of query-key products
    windows: tuple[int, ...]
    rope: Rope | None  # None: learned positions
    positions: int  # learned ones end there
    init_std: float


def activation(config: Mapping[str, Any], key: str, default: str) -> str:
    """An activation that a config names; PrepError for one that is not known."""
    name = config.get(key) or default
    if name not in ACTIVATIONS:
        raise PrepError(f"activation `{name}` is not known", f"{key} of config.json; known: {', '.join(ACTIVATIONS)}")
    return name


def positive(config: Mapping[str, Any], key: str, default: float) -> float:
    """A number above 0 that a config gives; PrepError for anything else."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise PrepError("config.json makes no sense", f"{key} is {value!r:.60}, it has to be a number above 0")
    return float(value)


def period(windows: Sequence[int]) -> int:
    """After how many layers the pattern of windows begins anew; a last part of it may be missing."""
    lengths = range(1, len(windows) + 1)
    return next(n for n in lengths if all(a == b for a, b in zip(windows, windows[n:])))
