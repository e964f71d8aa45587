"""Results of `verify` and `verify_logits`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict


class TensorDifference(TypedDict):
    """A difference of one tensor, or of one range of its rows.

    `leaf` is empty for a tensor without a path in the parameter tree. Different values have the `index` of the first
    one, its values `a` and `b`, and the `count`.
    """

    leaf: str
    tensor: str
    what: str
    index: NotRequired[Sequence[int]]
    a: NotRequired[object]
    b: NotRequired[object]
    count: NotRequired[int]


class SettingDifference(TypedDict):
    """A key of two configs, or a fact of two tokenizers, with other values a and b. None is an absent one."""

    kind: str
    key: str
    a: object
    b: object


class LeftOutTensor(TypedDict):
    """A tensor that only one of two checkpoints has, and the reason why it is not compared."""

    tensor: str
    checkpoint: str
    why: str


class OldAndNew(TypedDict):
    """A value before and after a change. `new` is None for a removed file."""

    old: int | str | None
    new: int | str | None


class AcceptedChange(TypedDict):
    """A file that was changed on purpose, with its size and digest, and the changed keys of a config.json."""

    file: str
    keys: NotRequired[Sequence[str]]
    bytes: NotRequired[OldAndNew]
    xxh3: OldAndNew


@dataclass(frozen=True, slots=True)
class TensorDistance:
    """The distance between the values a and b of one tensor in two checkpoints.

    Attributes:
        leaf: Path in the parameter tree. Empty for a tensor outside of it.
        tensor: Name in the checkpoint's files.
        max_abs: Largest |a - b|. Infinite if only one of two values is NaN.
        mean_abs: Mean of |a - b|.
        cosine: Cosine of the angle between the tensors as vectors. NaN if a value is not finite.
    """

    leaf: str
    tensor: str
    max_abs: float
    mean_abs: float
    cosine: float


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of a comparison with recorded digests or with another checkpoint.

    Attributes:
        is_equal: Whether no difference was found.
        tensors: Number of tensors compared. None if differences were found.
        values: Number of values compared. None if differences were found, or if no value was read (`quick`).
        differences: For each different tensor: `leaf` (path in the parameter tree, empty if it has none),
            `tensor` (name in the checkpoint's files), `what`, and for values `index`, `a`, `b`, `count`.
        seconds: Duration of the call in seconds.
        ignored_padding_rows: Number of rows, over all tensors of both checkpoints, that pad the vocabulary and were not
            compared. 0 for a comparison with digests, which covers padding.
        checked: Parts that a quick check compared, such as "names" and "shapes". Empty if values were compared.
        accepted: For each file of `accept` its name (`file`), and its old and new size and digest.
        checkpoint: The checkpoint, as errors name it.
        against: The second checkpoint, as errors name it. None for a comparison with digests.
        total_tensors: Number of tensors of the checkpoint, equal or not.
        distances: With a tolerance, the distance of each tensor that both checkpoints have in one shape.
        settings: Keys of the configs and facts of the tokenizers in which two checkpoints differ. They are differences
            only with `strict`.
        left_out: Tensors that one of two checkpoints leaves out on purpose. They are differences only with `strict`.
        remedy: How to replace a damaged checkpoint, e.g. by the command that made it. Empty for two checkpoints.
    """

    is_equal: bool
    tensors: int | None
    values: int | None
    differences: Sequence[TensorDifference]
    seconds: float
    ignored_padding_rows: int = 0
    checked: tuple[str, ...] = ()
    accepted: tuple[AcceptedChange, ...] = ()
    checkpoint: str = ""
    against: str | None = None
    total_tensors: int = 0
    distances: tuple[TensorDistance, ...] = ()
    remedy: str = ""
    settings: tuple[SettingDifference, ...] = ()
    left_out: tuple[LeftOutTensor, ...] = ()

    def __bool__(self) -> bool:
        return self.is_equal


@dataclass(frozen=True, slots=True)
class PromptComparison:
    """Distance between the outputs a and b of two models on one prompt.

    Attributes:
        name: Name of the prompt.
        tokens: Number of tokens.
        kl_mean: Mean over the tokens of the divergence KL(a || b), in nats.
        kl_max: Largest divergence of a token.
        top1_agreement: Fraction of the tokens with the same largest logit.
        top5_overlap: Mean fraction of the five largest logits in common.
        max_difference: Largest |a - b| of a logit. Infinite if a logit is not finite.
        layer_differences: max |a - b| / max |a| of the hidden states before the first layer, after each layer, and
            after the final norm in place of the last layer. The layers of an encoder come first. Empty if the models
            differ in depth or width.
        parts_at: First of these places with a difference above 0.001: "embedding", "layer N" or "final norm", with
            "encoder" before them in an encoder. None if there is none.
    """

    name: str
    tokens: int
    kl_mean: float
    kl_max: float
    top1_agreement: float
    top5_overlap: float
    max_difference: float
    layer_differences: tuple[float, ...]
    parts_at: str | None


@dataclass(frozen=True, slots=True)
class LogitComparison:
    """Result of a comparison of the logits of two models.

    Attributes:
        checkpoint: The checkpoint, as errors name it.
        against: The second checkpoint.
        library: Library that computed the second one.
        tolerance: Largest accepted difference between two logits.
        prompts: Distances on each prompt.
        seconds: Duration of the call in seconds.
    """

    checkpoint: str
    against: str
    library: str
    tolerance: float
    prompts: tuple[PromptComparison, ...]
    seconds: float

    @property
    def is_equal(self) -> bool:
        """Whether no logit differs by more than the tolerance, and all are finite."""
        differences = [prompt.max_difference for prompt in self.prompts]
        return all(math.isfinite(d) and d <= self.tolerance for d in differences)

    def __bool__(self) -> bool:
        return self.is_equal
