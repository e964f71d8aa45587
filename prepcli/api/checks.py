"""Check and inspect checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from prepcli.api.session import run_silently, silent_ui
from prepcli.commands import verify as verify_command
from prepcli.commands.inspect import InspectRequest, read_checkpoint
from prepcli.console.progress import Progress
from prepcli.inspection.contents import count_parameters
from prepcli.operations.conversion import common_options
from prepcli.operations.operation import public
from prepcli.operations.option_spec import PathLike
from prepcli.operations.options import SourceOptions
from prepcli.operations.results import Inspection, TensorSummary, Verification


@public
def verify(
    checkpoint: PathLike,
    against: PathLike | None = None,
    *,
    quick: bool = False,
    accept: Sequence[PathLike] = (),
    progress: Progress | None = None,
    **options: Unpack[SourceOptions],
) -> Verification:
    """Compare a checkpoint with its recorded digests, or with another checkpoint of any format.

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL.
        against: A second checkpoint; default: the digests in the manifest.
        quick: Compare names, shapes and dtypes only. No value is read.
        accept: Settings or tokenizer files of the checkpoint that you changed. Their new digests are recorded if
            nothing else differs.
        progress: Receives the bytes read; default: none. See `Progress`.
        **options: See `SourceOptions`.

    Returns:
        The differences. A difference is not an exception: the result is False in a condition. Two checkpoints are
        compared without the padding of the vocabulary, a checkpoint and its digests with it.

    Raises:
        UsageError: An argument is invalid, `checkpoint` has no digests and `against` is missing, or it records no
            file of `accept`.
        DamagedError: A file is missing, cut short or malformed, or a settings file was changed. Changed values are
            differences.
        PrepError: A checkpoint cannot be read, or the checkpoints are of different families.
    """
    common = common_options(checkpoint, None, options)
    request = verify_command.VerifyRequest(
        common,
        against=None if against is None else str(against),
        quick=quick,
        accept=tuple(str(path) for path in accept),
    )
    outcome = run_silently("verify", lambda ui: verify_command.verify(request, ui), progress)
    fields: Any = outcome.report.fields
    return Verification(
        is_equal=outcome.report.error is None,
        tensors=fields.get("tensors"),
        values=fields.get("values"),
        differences=fields.get("differences", ()),
        seconds=outcome.seconds,
        ignored_padding_rows=fields.get("ignored_padding_rows", 0),
    )


@public
def inspect(
    checkpoint: PathLike,
    *,
    revision: str | None = None,
    offline: bool = False,
    stream: bool = False,
) -> Inspection:
    """List the tensors of a checkpoint. Reads headers and indices only.

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL.
        revision: Branch, tag or commit on the hub.
        offline: Use only the hub's cache.
        stream: Read from the hub without a local copy.

    Returns:
        Name, shape, dtype and size of every tensor, and the number of parameters.

    Raises:
        UsageError: An argument is invalid.
        DamagedError: A header, an index or other metadata is damaged.
        PrepError: The checkpoint cannot be read.
    """
    request = InspectRequest(str(checkpoint), revision=revision, offline=offline, stream=stream)
    _, contents = read_checkpoint(request, request.checkpoint, revision, silent_ui("inspect"))
    tensors = (
        TensorSummary(entry.name, entry.shape, entry.dtype, entry.nbytes)
        for entry in contents.entries
    )
    return Inspection(
        contents.display_name, contents.kind, tuple(tensors), count_parameters(contents)
    )
