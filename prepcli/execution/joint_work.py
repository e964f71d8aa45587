"""Work that several processes do together: if it fails in one of them, it fails in all."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from prepcli.errors import PrepError
from trainer.distributed.process_group import ProcessGroup


@contextlib.contextmanager
def joint_work(group: ProcessGroup, name: str) -> Iterator[None]:
    """Run the block in all processes, and wait until all have left it.

    Args:
        group: The processes.
        name: Name of the work, unique among the threads of this process.

    Raises:
        PrepError: The block raised in another process.
    """
    own_error: Exception | None = None
    try:
        yield
    except Exception as error:
        own_error = error
    failures = group.gather(
        name, "" if own_error is None else _encode_error(own_error, group.index)
    )
    failure = group.broadcast(f"{name}-outcome", next(filter(None, failures), ""))
    if own_error is not None:
        raise own_error
    if failure:
        raise PrepError(**json.loads(failure))


def _encode_error(error: Exception, index: int) -> str:
    """Return the fields of a PrepError that names the process, as JSON."""
    if not isinstance(error, PrepError):
        error = PrepError("the work failed", f"{type(error).__name__}: {error}")
    return json.dumps({**error.fields(), "what": f"process {index}: {error.what}"})
