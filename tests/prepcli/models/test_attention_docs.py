"""The table of kernels in the documentation against the capabilities in the code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prepcli.models.attention_kernels import KERNEL_SPECS, AttentionFeature, KernelSpec

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "attention.md"


def head_widths(spec: KernelSpec) -> str:
    """Return the supported head widths as text."""
    if spec.max_head_dim is None:
        return "any"
    widths = f"multiples of {spec.head_multiple} up to {spec.max_head_dim}"
    return f"{widths} ({spec.hopper_max_head_dim} on Hopper and later)"


def table_lines() -> Iterator[str]:
    """Yield the lines of the table."""
    specs = KERNEL_SPECS.values()
    rows = {
        "": [f"`{spec.name}`" for spec in specs],
        "---": ["---"] * len(specs),
        "platforms": [", ".join(spec.platforms) or "all" for spec in specs],
        "dtypes": [", ".join(spec.dtypes) for spec in specs],
        "head widths": [head_widths(spec) for spec in specs],
        **{
            str(feature): ["yes" if feature in spec.features else "" for spec in specs]
            for feature in AttentionFeature
        },
    }
    yield from (f"| {' | '.join([name, *cells])} |" for name, cells in rows.items())


def test_table_of_kernels_is_current():
    assert "\n".join(table_lines()) in PAGE.read_text()
