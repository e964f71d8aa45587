"""Random meshes, and the errors of parsing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st

from trainer.models.errors import USAGE, PrepError
from trainer.models.mesh import MESH_AXES, parse_mesh


def error_of(call: Callable[..., object], *args: Any, **kwargs: Any) -> PrepError:
    """Return the error that a call raises."""
    with pytest.raises(PrepError) as caught:
        call(*args, **kwargs)
    return caught.value


def read(call: Callable[[str], Any], text: str) -> Any:
    """Return what `call` returns for the text, or None if it raises a usage error; fail the test for another error."""
    try:
        return call(text)
    except PrepError as error:
        return None if error.code == USAGE else pytest.fail(f"exit code {error.code}")


@st.composite
def mesh_texts(draw: st.DrawFn) -> str:
    """Draw the text of a mesh, by position or by name."""
    sizes = st.integers(1, 4)
    axes = draw(st.permutations(MESH_AXES))[: draw(st.integers(1, 4))]
    parts = [f"{axis}:{draw(sizes)}" for axis in axes] if draw(st.booleans()) else [str(draw(sizes)) for _ in range(3)]
    return draw(st.sampled_from(["", "!"])) + ",".join(parts)


MESHES = mesh_texts().map(parse_mesh)
