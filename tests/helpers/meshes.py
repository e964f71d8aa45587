"""Random meshes and leaves, and the errors of parsing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st

from prepcli.core.errors import USAGE, PrepError
from prepcli.models.mesh import MESH_AXES, parse_mesh
from prepcli.models.rules import PARAM_RULES


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
    parts = (
        [f"{axis}:{draw(sizes)}" for axis in axes]
        if draw(st.booleans())
        else [str(draw(sizes)) for _ in range(3)]
    )
    return draw(st.sampled_from(["", "!"])) + ",".join(parts)


MESHES = mesh_texts().map(parse_mesh)


@st.composite
def split_leaves(draw: st.DrawFn):
    """Draw a mesh, rules, and the dims and shape of a divisible leaf."""
    mesh = draw(MESHES)
    dims = [(name,) for name in draw(st.permutations(list(PARAM_RULES)))[: draw(st.integers(0, 4))]]
    choices = st.lists(st.sampled_from(MESH_AXES), unique=True, max_size=3).map(tuple)
    rules = {name: (draw(choices), ()) for (name,) in draw(st.permutations(dims))}
    shape = tuple(mesh.n_devices * draw(st.integers(1, 3)) for _ in dims)
    return mesh, rules, dims, shape
