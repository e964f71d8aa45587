"""Checkpoints of an earlier prep, which have fewer records than current ones."""

from __future__ import annotations

from collections.abc import Sequence

from prepcli.core.errors import Command, text
from prepcli.core.formatting import format_bytes
from prepcli.core.observer import Observer
from prepcli.formats.checksums import CHECKSUMS_FILE
from prepcli.formats.manifest import RECREATE_HINT
from prepcli.planning.manifest_fields import Manifest
from prepcli.restore.digest_checks import check_tensors
from prepcli.sources.source import Source, SourceTensor


def note_missing_file_digests(
    display_name: str, manifest: Manifest | None, observer: Observer
) -> None:
    """Print a note if a manifest has no digests of the checkpoint's settings and tokenizer files."""
    if manifest and "files" not in manifest:
        unchecked = "its settings and tokenizer files are not checked"
        observer.note(f"{display_name} was written by an earlier prep: {unchecked}")


def check_without_checksums(
    source: Source,
    tensors: Sequence[SourceTensor],
    observer: Observer,
    *,
    hint: str = RECREATE_HINT,
) -> None:
    """Check the digests of whole tensors, for a checkpoint without checksums of its chunks.

    Args:
        source: Opened checkpoint.
        tensors: Tensors to read and check. Tensors without digests are skipped.
        observer: Receives a note and progress.
        hint: Hint of the error for a damaged tensor.

    Raises:
        PrepError: A tensor is damaged.
    """
    nbytes = sum(tensor.nbytes for tensor in tensors if tensor.digests)
    if not nbytes:
        return
    cost = f"checking it reads another {format_bytes(nbytes)}"
    name = f"{source.display_name} has no {CHECKSUMS_FILE} (written by an earlier prep)"
    reshard = Command("reshard")
    observer.note(text("{}: {}; {} writes a checkpoint with checksums", name, cost, reshard))
    check_tensors(source, tensors, observer.progress(), hint)
