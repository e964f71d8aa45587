"""Joint work of several processes: if it fails in one of them, it fails in all."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from prepcli.core.errors import RERUN_HINT, PrepError
from prepcli.core.process_group import ProcessGroup


@contextlib.contextmanager
def joint_work(group: ProcessGroup, name: str) -> Iterator[None]:
    """Wait at the end of a `with` block for all processes. Raise in each one if the block failed in any of them.

    Args:
        group: The processes.
        name: Name of the block, the same in all processes and unique among the threads of a process.

    Raises:
        PrepError: The block raised in another process.
    """
    # Two exchanges: process 0 has all failures only after the gather, and each process must learn of the
    # first one. A process that failed takes part too, or the others would wait for it.
    own_error: Exception | None = None
    own_failure = ""
    try:
        yield
    except Exception as error:
        own_error = error
        own_failure = _encode_error(error, group.index)
    failures = group.gather(name, own_failure)
    failure = group.broadcast(f"{name}-outcome", next(filter(None, failures), ""))
    if own_error is not None:
        raise own_error
    if failure:
        raise PrepError(**json.loads(failure))


def _encode_error(error: Exception, index: int) -> str:
    """Return the fields of a PrepError with the name of the process, as JSON."""
    if not isinstance(error, PrepError):
        error = PrepError("the work failed", f"{type(error).__name__}: {error}", RERUN_HINT)
    return json.dumps({**error.fields(), "what": f"process {index}: {error.what}"})
