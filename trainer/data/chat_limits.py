"""Limits of work and of sizes for an untrusted template.

A template is a program. A time limit would stop valid templates on a slow machine, so the work is
counted instead: the steps of loops, calls and filters, and the characters of their results. The
size of each value is limited too. Both limits grow with the size of the messages. Together they
bound time and memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

from jinja2 import TemplateRuntimeError
from jinja2.utils import Namespace

# Work is counted in characters of output. A step of a loop counts as this many characters.
STEP_WORK = 64
# A call of a macro or a method takes several times as long as a step of a loop.
CALL_WORK = 256
# An element of a container counts as this many characters.
ELEMENT_SIZE = 16
# Constant parts of the limits on work and on the size of a value. Work of 2^26 is a million steps of
# loops.
BASE_WORK = 1 << 26
BASE_SIZE = 1 << 20
# The constant part for a rendering that only shows how a template takes messages. It takes about a tenth of a second.
PROBE_WORK = 1 << 22
# Parts of the limits that grow with the characters of the messages.
WORK_PER_CHAR = 256
SIZE_PER_CHAR = 16
MAX_INT_BITS = 4096
# Maximum digits of a width or a precision in a format: `'{:9999}'` is allowed.
MAX_WIDTH_DIGITS = 4
# Maximum digits of `round`. Floats have no more.
MAX_PRECISION = 300
MAX_JSON_INDENT = 64

LARGE_NUMBER = re.compile(rf"\d{{{MAX_WIDTH_DIGITS + 1},}}")
# A directive of `%`: name, width and precision
PERCENT_FIELD = re.compile(r"%(\([^()]*\))?[-+ #0]*(\*|\d+)?(?:\.(\*|\d+))?")


class TemplateLimitError(TemplateRuntimeError):
    """A template does more work, or makes a larger value, than its limits allow."""


class OpaqueNamespace(Namespace):
    """The `namespace` of Jinja, printed without its values.

    A template may assign new values after the namespace was measured. Printing them would bypass
    the limits.
    """

    def __repr__(self) -> str:
        return "<Namespace>"


class RenderLimits:
    """The remaining work of one rendering, and the largest size of a value."""

    def __init__(self) -> None:
        self._base_work = BASE_WORK
        self._work_left = BASE_WORK
        self.max_size = BASE_SIZE

    def start(self, num_chars: int, *, base_work: int = BASE_WORK) -> None:
        """Set the limits for a rendering of messages with `num_chars` characters in total."""
        self._base_work = base_work
        self._work_left = base_work + WORK_PER_CHAR * num_chars
        self.max_size = BASE_SIZE + SIZE_PER_CHAR * num_chars

    @property
    def is_costly(self) -> bool:
        """Whether the rendering has done more work than a probe may do, and more than its messages explain."""
        return self._work_left < self._base_work - PROBE_WORK

    def count_work(self, work: int = STEP_WORK) -> None:
        """Subtract work from the work that the template may still do.

        Raises:
            TemplateLimitError: The limit is reached.
        """
        self._work_left -= work
        if self._work_left < 0:
            raise TemplateLimitError(
                "it does too much work: endless or very long loops, or too much text"
            )

    def check(self, size: int) -> None:
        """Raise TemplateLimitError if a value of this size, not made yet, would be too large."""
        if size > self.max_size:
            raise TemplateLimitError(
                f"it makes a value of {size:.3g} characters, the limit is {self.max_size:,}"
            )

    def check_bits(self, num_bits: int) -> None:
        """Raise TemplateLimitError if an integer of this many bits would be too large."""
        if num_bits > MAX_INT_BITS:
            raise TemplateLimitError(
                f"it makes an integer of {num_bits:.3g} bits, the limit is {MAX_INT_BITS:,}"
            )

    def measured(self, value: Any) -> Any:
        """Count a new value and return it. Raise TemplateLimitError if it is too large."""
        self.count_work(self.count_chars(value))
        return value

    def count_chars(self, value: Any) -> int:
        """Count the characters in a value and its elements. Repeated parts count each time.

        Every new container is measured. No value is therefore larger than the limit, and converting
        values to text and comparing them take bounded time.

        Raises:
            TemplateLimitError: The value is too large.
        """
        if isinstance(value, str):
            self.check(len(value))
            return len(value)
        total = 0
        pending = [value]
        while pending:
            item = pending.pop()
            if isinstance(item, str | bytes):
                total += len(item)
            elif isinstance(item, Mapping):
                total += ELEMENT_SIZE * len(item)
                pending += item.keys()
                pending += item.values()
            elif isinstance(item, list | tuple):
                total += ELEMENT_SIZE * len(item)
                pending += item
            elif isinstance(item, range):
                total += ELEMENT_SIZE * len(item)
            elif isinstance(item, int):
                self.check_bits(item.bit_length())
                total += 1
            self.check(total + len(pending))
        return total

    def check_power(self, base: Any, exponent: Any) -> None:
        """Check the result of `base ** exponent`."""
        if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
            self.check_bits(base.bit_length() * exponent)

    def check_product(self, left: Any, right: Any) -> None:
        """Check the result of `left * right`: of numbers, or of a text or list and a number."""
        if isinstance(left, int) and isinstance(right, int):
            self.check_bits(left.bit_length() + right.bit_length())
        elif isinstance(left, int):
            self.check_repeated(right, left)
        elif isinstance(right, int):
            self.check_repeated(left, right)

    def check_repeated(self, value: Any, count: int) -> None:
        """Check the size of a repeated value."""
        self.check(self.count_chars(value) * max(0, count))

    def check_sum(self, left: Any, right: Any) -> None:
        """Check the size of the result of `left + right` before it is computed."""
        if isinstance(left, int) and isinstance(right, int):
            self.check_bits(max(left.bit_length(), right.bit_length()))
        elif not isinstance(left, float) and not isinstance(right, float):
            self.check(self.count_chars(left) + self.count_chars(right))

    def check_percent(self, template: str, values: Any) -> None:
        """Check the size of the text `template % values` before it is made.

        A width counts in full: `"%100d" % 5` has 100 characters. Each named field, such as `%(name)s`,
        counts all values.
        """
        size = len(template)
        num_fields = 0
        for name, width, precision in PERCENT_FIELD.findall(template):
            num_fields += bool(name)
            for number in (width, precision):
                if number == "*" or len(number) > MAX_WIDTH_DIGITS:
                    raise _too_wide_error(number)
                size += int(number or 0)
        self.check(size + max(1, num_fields) * self.count_chars(values))

    def check_fields(self, template: str, values: Sequence[Any]) -> None:
        """Check the result of `template.format(*values)` except its widths: see `check_field`."""
        num_fields = template.count("{")
        is_each_used_once = num_fields == template.count("{}")
        # `{0}{0}{0}` repeats a value as often as there are fields.
        repeats = num_fields
        if is_each_used_once:
            repeats = 1
        width = 0
        if ":" in template:
            width = 10**MAX_WIDTH_DIGITS
        self.check(len(template) + repeats * self.count_chars(list(values)) + num_fields * width)

    def check_field(self, format_spec: str) -> None:
        """Check the widths of one field of a format."""
        if number := LARGE_NUMBER.search(format_spec):
            raise _too_wide_error(number[0])

    def check_replace(self, text: Any, old: Any, new: Any) -> None:
        """Check the size of a text in which parts are replaced."""
        text = str(text)
        old = str(old)
        new = str(new)
        num_parts = text.count(old)
        self.check(len(text) + num_parts * len(new))

    def check_join(self, separator: Any, values: Any) -> None:
        """Check the size of joined values."""
        num_values = 1
        if isinstance(values, Sized):
            num_values = len(values)
        self.check(self.count_chars(values) + self.count_chars(str(separator)) * num_values)

    def check_width(self, text: Any, width: Any) -> None:
        """Check the size of a text with `width` more characters in each line.

        Args:
            text: The text.
            width: Number of characters, or the characters themselves, e.g. `indent(">>")` in a template.
        """
        if isinstance(width, str):
            width = len(width)
        if isinstance(width, int):
            num_lines = str(text).count("\n") + str(text).count("\t") + 1
            self.check(len(str(text)) + num_lines * width)

    def check_count(self, count: Any, value: Any = None) -> None:
        """Check the size of a list with `count` copies of a value."""
        if isinstance(count, int):
            self.check((ELEMENT_SIZE + self.count_chars(value)) * max(0, count))

    def check_json(self, value: Any, indent: Any, separators: Any) -> None:
        """Check the size of a value as JSON."""
        size = self.count_chars(value)
        width = len(indent) if isinstance(indent, str) else indent or 0
        if width > MAX_JSON_INDENT:
            raise TemplateLimitError(
                f"tojson has an indent of {width:.3g}, the limit is {MAX_JSON_INDENT}"
            )
        self.check(size + size // ELEMENT_SIZE * self.count_chars(separators))

    def listed(self, items: Iterable[Any]) -> list[Any]:
        """Return the items of a generator as a list. Count each item as a step of a loop."""
        values: list[Any] = []
        size = 0
        for item in items:
            self.count_work()
            size += ELEMENT_SIZE + self.count_chars(item)
            self.check(size)
            values.append(item)
        return values

    def joined(self, pieces: Iterable[str]) -> str:
        """Join the pieces of an output, a macro or a block. Count their characters."""
        parts: list[str] = []
        num_chars = 0
        for piece in pieces:
            num_chars += len(piece)
            self.check(num_chars)
            self.count_work(1 + len(piece))
            parts.append(piece)
        return "".join(parts)


def _too_wide_error(number: str) -> TemplateLimitError:
    limit = 10**MAX_WIDTH_DIGITS - 1
    return TemplateLimitError(
        f"a format has the width or precision {number:.20}, the limit is {limit}"
    )


class CountedSteps:
    """The items of a loop, each counted as a step."""

    def __init__(self, items: Iterable[Any], limits: RenderLimits) -> None:
        self._items = items
        self._limits = limits

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._limits.count_work()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # pyright: ignore[reportArgumentType] - raises TypeError for a generator, as Jinja expects
