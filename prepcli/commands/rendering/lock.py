"""Written lock files as text and JSON."""

from __future__ import annotations

from prepcli.commands.console.ui import Report
from prepcli.commands.operations.results import LockedModel
from prepcli.core.formatting import count_text, format_bytes


def lock_report(locked: LockedModel) -> Report:
    """Return the path of a lock file, and what it covers."""
    fields: dict[str, object] = {
        "path": str(locked.path),
        "source": locked.source,
        "revision": locked.revision,
        "files": locked.files,
        "tensors": locked.tensors,
        "bytes": locked.nbytes,
        "already": locked.already_done,
    }
    return Report(str(locked.path), fields)


def lock_line(locked: LockedModel) -> str:
    """Describe what a lock file covers: `locked  9 files, 316 tensors, 4.95 GiB in 6.1 s`."""
    size = format_bytes(locked.nbytes)
    state = "already locked" if locked.already_done else "locked"
    counts = f"{count_text(locked.files, 'file')}, {count_text(locked.tensors, 'tensor')}"
    return f"{state}  {counts}, {size} in {locked.seconds:.1f} s"
