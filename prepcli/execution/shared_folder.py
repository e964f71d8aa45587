"""Check that all processes of a job see the same folder."""

from __future__ import annotations

import contextlib
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

from prepcli.engine.files import io_error
from prepcli.errors import PrepError
from prepcli.execution.joint_work import joint_work
from prepcli.execution.paths import fsync_path
from trainer.distributed.process_group import ProcessGroup

TOKEN_PREFIX = ".seen-"  # of a file in the folder, which exists during the check


def check_shared_folder(folder: Path, group: ProcessGroup) -> None:
    """Check that all processes see the folder of process 0, which creates it.

    Args:
        folder: The folder.
        group: The processes.

    Raises:
        PrepError: A process has another folder of this name.
    """
    name = group.broadcast("folder-token", TOKEN_PREFIX + uuid.uuid4().hex)
    with _token(folder / name, group), joint_work(group, "folder-seen"):
        if not (folder / name).exists():
            what = f"{socket.gethostname()} does not see the run's folder of process 0"
            why = f"{folder.absolute()} is another folder there"
            raise PrepError(what, why, "`--out FOLDER` on a file system that all hosts share")


@contextlib.contextmanager
def _token(path: Path, group: ProcessGroup) -> Iterator[None]:
    """Create a file inside the context, in process 0."""
    with joint_work(group, "folder-created"):
        if group.index == 0:
            _create(path)
    try:
        yield
    finally:
        if group.index == 0:
            path.unlink(missing_ok=True)


def _create(path: Path) -> None:
    """Create an empty file and its folder; remove tokens of killed processes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.glob(f"{TOKEN_PREFIX}*"):
            leftover.unlink()
        path.touch()
        fsync_path(path.parent)
    except OSError as error:
        raise io_error(path, error) from error
