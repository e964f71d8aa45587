"""Hints for a damaged output: its recorded command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prepcli.core.errors import GET_AGAIN_HINT, PrepError
from prepcli.planning.manifest_fields import Manifest

# Characters of a recorded command in a message. A manifest may come from anywhere.
MAX_REQUEST_LENGTH = 300
RECREATE_HINT = "create the checkpoint again, or use an earlier one"


def again_hint(manifest: Manifest | None) -> str:
    """Return the hint to replace a damaged checkpoint. For an output it is the command in its manifest."""
    if manifest is None:
        return GET_AGAIN_HINT
    if manifest.is_training_step:
        return RECREATE_HINT
    request = " ".join(manifest.request.split())
    if not request:
        return GET_AGAIN_HINT
    return f"make it again: `{request:.{MAX_REQUEST_LENGTH}}`"


@contextmanager
def again_hints(manifest: Manifest | None) -> Iterator[None]:
    """Name the command of an output in errors of the block about its damaged and missing files."""
    try:
        yield
    except PrepError as error:
        if manifest is None:
            raise
        hint = error.hint.replace(GET_AGAIN_HINT, again_hint(manifest))
        if isinstance(error.__cause__, FileNotFoundError):
            hint = again_hint(manifest)
        raise error.with_texts(hint=hint) from error.__cause__
