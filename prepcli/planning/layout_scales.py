"""Changes of values in the layout of another trainer, such as MaxText's divided queries."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from prepcli.algebra.axis_map import RowScale, Sizes
from prepcli.planning.manifest_fields import ScaleFields, ScaleRecord

SIGNIFICANT_DTYPES = ("", "float16", "bfloat16", "float32")
ROOT_DTYPES = ("", "float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class LayoutScale:
    """A change of the values of a stream, after its cast: a division by a power of a square root, then a sum.

    A layout determines all fields but `significant` by the name of the tensor, so the plan's digest has only the
    number.

    Attributes:
        number: The number under the square root. 1 for a change without a root.
        significant: Dtype whose numbers the values are before the change, if it is narrower than the written dtype.
            Otherwise empty. The way back rounds to it.
        power: Number of divisions. A negative number is for multiplications.
        root_dtype: Dtype of the rounded root, or "".
        offset: Number to add.
    """

    number: int
    significant: str = ""
    power: int = field(default=1, repr=False)
    root_dtype: str = field(default="", repr=False)
    offset: int = field(default=0, repr=False)

    @property
    def is_exact(self) -> bool:
        """Whether the way back returns every value: the root is a power of 2, or the values have a narrower dtype."""
        if self.offset:
            # 1 + 2^-30 is 1 in float32, so that a small value is lost in a sum.
            return False
        if self.significant:
            return True
        if self.power % 2 == 0 and not self.root_dtype:
            return self.number & (self.number - 1) == 0
        root = math.isqrt(self.number)
        return root * root == self.number and root & (root - 1) == 0

    @property
    def formula(self) -> str:
        """The change as text, e.g. `/ sqrt(8)`."""
        if self.offset:
            return f"+ {self.offset}"
        if self.root_dtype and self.power == -1:
            return f"* {self.root_dtype}(sqrt({self.number}))"
        power = f"^{self.power}" if self.power != 1 else ""
        return f"/ sqrt({self.number}){power}"

    @property
    def description(self) -> str:
        """The change as a predicate, e.g. `divides by the square root of 8`."""
        if self.offset:
            return f"adds {self.offset}"
        if self.power < 0:
            return f"multiplies by the square root of {self.number}"
        return f"divides by the square root of {self.number}"

    def of_moment(self, order: int) -> LayoutScale | None:
        """Return the scale of a moment of Adam, or None if the moment keeps its values.

        y = x / s has the gradient dL/dy = s dL/dx. Averages of gradients are multiplied by s, and averages of their
        squares by s^2. E.g. s = 8: a moment of 0.5 becomes 4, and a second moment of 0.25 becomes 16. A sum changes no
        gradient.

        Args:
            order: 1 for averages of gradients, 2 for averages of their squares.
        """
        if self.number == 1:
            return None
        return LayoutScale(self.number, power=-order * self.power, root_dtype=self.root_dtype)

    def fields(self) -> ScaleFields:
        """Return the fields of a record of this scale. Defaults are left out."""
        fields: ScaleFields = {"sqrt": self.number}
        if self.power != 1:
            fields["power"] = self.power
        if self.root_dtype:
            fields["root"] = self.root_dtype
        if self.offset:
            fields["offset"] = self.offset
        return fields


def bind_scale(scale: RowScale, sizes: Sizes) -> LayoutScale:
    """Return the scale of a row with the size of its axis."""
    number = 1
    if scale.atom:
        size = sizes[scale.atom]
        assert isinstance(size, int)
        number = size
    return LayoutScale(number, power=scale.power, root_dtype=scale.root_dtype, offset=scale.offset)


def recorded_scale(record: ScaleFields, significant: str = "") -> LayoutScale:
    """Return the scale in a record. See `LayoutScale.fields`."""
    return LayoutScale(
        record["sqrt"],
        significant,
        record.get("power", 1),
        record.get("root", ""),
        record.get("offset", 0),
    )


def scaled_digests(record: ScaleRecord, num_rows: int) -> tuple[tuple[int, int, str], ...]:
    """Return the digests of changed values: (first row, one past the last, digest)."""
    if "digest" in record:
        return ((0, num_rows, record["digest"]),)
    return tuple((first, stop, digest) for first, stop, digest in record.get("digests", ()))


def is_scale_record(record: ScaleRecord) -> bool:
    """Return whether the values of a record are in range."""
    is_known = record["significant"] in SIGNIFICANT_DTYPES and record.get("root", "") in ROOT_DTYPES
    has_digest = "digests" in record or "digest" in record
    return is_known and has_digest and record["sqrt"] >= 1 and record["lost"] >= 0
