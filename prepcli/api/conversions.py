"""Convert checkpoints. Each function has a `plan_*` counterpart that returns the pure plan and writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from prepcli.api.caller_terms import conversion_annotations, to_callers_terms
from prepcli.api.options import (
    ExportOptions,
    MergeOptions,
    PadVocabOptions,
    PathLike,
    ReshardOptions,
    SaveInitOptions,
    as_tuple,
    common_options,
    match_options,
    select,
    to_shard_nbytes,
)
from prepcli.api.public import public
from prepcli.api.results import Conversion
from prepcli.api.session import run_silently, silent_ui
from prepcli.commands import export as export_command
from prepcli.commands import merge as merge_command
from prepcli.commands import pad_vocab as pad_vocab_command
from prepcli.commands import save_init as save_init_command
from prepcli.commands.conversion import CommonOptions, PlannedConversion, open_checkpoint
from prepcli.console.progress import Progress
from prepcli.console.ui import Report, Ui
from prepcli.planning.plan import Plan
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.source import Source

NEW_ROWS = ("init", "seed", "true_vocab")
LAYOUT = ("mesh", "scan", "scan_axis", "compress")


@public
def pad_vocab(
    checkpoint: PathLike,
    out: PathLike | None = None,
    *,
    progress: Progress | None = None,
    **options: Unpack[PadVocabOptions],
) -> Conversion:
    """Pad the vocabulary of a checkpoint and write a Hugging Face folder.

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL.
        out: Output folder; default: a name made from the checkpoint's.
        progress: Receives the bytes written; default: none. See `Progress`.
        **options: See `PadVocabOptions`.

    Returns:
        The output's path and counts. If an equal output exists, no file is written: `already_done` is True.

    Raises:
        UsageError: An argument is invalid, or the request does not fit the source.
        OutputExistsError: `out` exists and is not the result of this request.
        DamagedError: Files of the source are damaged.
        PrepError: The conversion failed. An interrupted one resumes when called again.
    """
    request = _pad_vocab_request(checkpoint, out, options)
    return _convert("pad-vocab", lambda ui: pad_vocab_command.pad_vocab(request, ui), progress)


@public
def plan_pad_vocab(checkpoint: PathLike, **options: Unpack[PadVocabOptions]) -> Plan:
    """Plan `pad_vocab` from headers only: no weight is read and no file is written.

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL.
        **options: See `PadVocabOptions`. Options of the output folder have no effect.

    Returns:
        The files, tensors and checks of the conversion. `print(plan)` lists them.

    Raises:
        UsageError: An argument is invalid, or the request does not fit the source.
        DamagedError: A header, an index or other metadata of the source is damaged.
        PrepError: The source cannot be read, or is not supported.
    """
    request = _pad_vocab_request(checkpoint, None, options)
    return _plan(request.common, lambda source, located: pad_vocab_command.plan_pad_vocab(request, source, located))


@public
def save_init(
    checkpoint: PathLike,
    out: PathLike | None = None,
    *,
    progress: Progress | None = None,
    **options: Unpack[SaveInitOptions],
) -> Conversion:
    """Convert a Hugging Face folder to an Orbax checkpoint whose chunks are the shards of a mesh.

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL.
        out: Output folder or URL; default: a name made from the checkpoint's.
        progress: Receives the bytes written; default: none. See `Progress`.
        **options: See `SaveInitOptions`.

    Returns:
        The output's path and counts. If an equal output exists, no file is written: `already_done` is True.

    Raises:
        UsageError: An argument is invalid, or the request does not fit the source.
        OutputExistsError: `out` exists and is not the result of this request.
        DamagedError: Files of the source are damaged.
        PrepError: The conversion failed. An interrupted one resumes when called again.
    """
    request = _save_init_request(checkpoint, out, options)
    return _convert("save-init", lambda ui: save_init_command.save_init(request, ui), progress)


@public
def plan_save_init(checkpoint: PathLike, **options: Unpack[SaveInitOptions]) -> Plan:
    """Plan `save_init` from headers only: no weight is read and no file is written.

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL.
        **options: See `SaveInitOptions`. Options of the output folder have no effect.

    Returns:
        The files, tensors and checks of the conversion. `print(plan)` lists them.

    Raises:
        UsageError: An argument is invalid, or the request does not fit the source.
        DamagedError: A header, an index or other metadata of the source is damaged.
        PrepError: The source cannot be read, or is not supported.
    """
    request = _save_init_request(checkpoint, None, options)
    return _plan(request.common, lambda source, located: save_init_command.plan_orbax_item(request, source, located))


@public
def reshard(
    checkpoint: PathLike,
    out: PathLike | None = None,
    *,
    progress: Progress | None = None,
    **options: Unpack[ReshardOptions],
) -> Conversion:
    """Write an Orbax checkpoint again for another mesh or layer layout.

    Args:
        checkpoint: Folder or URL of an init checkpoint, a training run or a step of one.
        out: Output folder or URL; default: a name made from the checkpoint's.
        progress: Receives the bytes written; default: none. See `Progress`.
        **options: See `ReshardOptions`.

    Returns:
        The output's path and counts. If an equal output exists, no file is written: `already_done` is True.

    Raises:
        UsageError: An argument is invalid, or the request does not fit the source.
        OutputExistsError: `out` exists and is not the result of this request.
        DamagedError: Files of the source are damaged.
        PrepError: The conversion failed. An interrupted one resumes when called again.
    """
    request = _reshard_request(checkpoint, out, options)
    return _convert("reshard", lambda ui: save_init_command.reshard(request, ui), progress)


@public
def plan_reshard(checkpoint: PathLike, **options: Unpack[ReshardOptions]) -> Plan:
    """Plan `reshard` from headers only: no weight is read and no file is written.

    Args:
        checkpoint: Folder or URL of an init checkpoint, a training run or a step of one.
        **options: See `ReshardOptions`. Options of the output folder have no effect.

    Returns:
        The files, tensors and checks of the conversion. `print(plan)` lists them.

    Raises:
        UsageError: An argument is invalid, or the request does not fit the source.
        DamagedError: A header, an index or other metadata of the source is damaged.
        PrepError: The source cannot be read, or is not supported.
    """
    request = _reshard_request(checkpoint, None, options)
    plan = partial(save_init_command.plan_orbax_item, request, command="reshard")
    return _plan(request.common, plan)


@public
def export(
    checkpoint: PathLike,
    out: PathLike | None = None,
    *,
    progress: Progress | None = None,
    **options: Unpack[ExportOptions],
) -> Conversion:
    """Write a Hugging Face folder, or a Flax or EasyLM checkpoint, without the padding of the vocabulary.

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL.
        out: Output folder; default: a name made from the checkpoint's.
        progress: Receives the bytes written; default: none. See `Progress`.
        **options: See `ExportOptions`.

    Returns:
        The output's path and counts. If an equal output exists, no file is written: `already_done` is True.

    Raises:
        UsageError: An argument is invalid, or the request does not fit the source.
        OutputExistsError: `out` exists and is not the result of this request.
        DamagedError: Files of the source are damaged.
        PrepError: The conversion failed. An interrupted one resumes when called again.
    """
    request = _export_request(checkpoint, out, options)
    return _convert("export", lambda ui: export_command.export(request, ui), progress)


@public
def plan_export(checkpoint: PathLike, **options: Unpack[ExportOptions]) -> Plan:
    """Plan `export` from headers only: no weight is read and no file is written.

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL.
        **options: See `ExportOptions`. Options of the output folder have no effect.

    Returns:
        The files, tensors and checks of the conversion. `print(plan)` lists them.

    Raises:
        UsageError: An argument is invalid, or the request does not fit the source.
        DamagedError: A header, an index or other metadata of the source is damaged.
        PrepError: The source cannot be read, or is not supported.
    """
    request = _export_request(checkpoint, None, options)
    return _plan(request.common, lambda source, located: export_command.plan_export(request, source, located))


@public
def merge(
    adapter: PathLike,
    base: PathLike,
    out: PathLike | None = None,
    *,
    progress: Progress | None = None,
    **options: Unpack[MergeOptions],
) -> Conversion:
    """Add a LoRA adapter to the weights of its base model, and write a Hugging Face folder.

    Args:
        adapter: Folder of an adapter in the format of PEFT.
        base: Folder, alias, hub id, or `gs://`/`s3://` URL of the base model.
        out: Output folder; default: a name made from the base's.
        progress: Receives the bytes written; default: none. See `Progress`.
        **options: See `MergeOptions`.

    Returns:
        The output's path and counts. If an equal output exists, no file is written: `already_done` is True.

    Raises:
        UsageError: An argument is invalid.
        OutputExistsError: `out` exists and is not the result of this request.
        DamagedError: Files of the base are damaged.
        PrepError: The adapter does not fit the base, or the merge failed. An interrupted one resumes when called again.
    """
    request = merge_command.MergeRequest(
        Path(adapter), common_options(base, out, options), verify=options.get("verify", True)
    )
    return _convert("merge", lambda ui: merge_command.merge(request, ui), progress)


def _pad_vocab_request(checkpoint: PathLike, out: PathLike | None, options: Any) -> pad_vocab_command.PadVocabRequest:
    return pad_vocab_command.PadVocabRequest(
        common_options(checkpoint, out, options),
        **select(options, "multiple", "size", "mesh", *NEW_ROWS),
        match_options=match_options(options),
    )


def _save_init_request(checkpoint: PathLike, out: PathLike | None, options: Any) -> save_init_command.SaveInitRequest:
    return save_init_command.SaveInitRequest(
        common_options(checkpoint, out, options),
        rules=as_tuple(options.get("rules", ())),
        **select(options, "pad_vocab", "dtype", *LAYOUT, *NEW_ROWS),
        match_options=match_options(options),
    )


def _reshard_request(checkpoint: PathLike, out: PathLike | None, options: Any) -> save_init_command.SaveInitRequest:
    return save_init_command.SaveInitRequest(
        common_options(checkpoint, out, options),
        rules=as_tuple(options.get("rules", ())),
        **select(options, "params_only", "true_vocab", *LAYOUT),
    )


def _export_request(checkpoint: PathLike, out: PathLike | None, options: Any) -> export_command.ExportRequest:
    shard_size = options.get("shard_size")
    limit = {} if shard_size is None else {"shard_nbytes": to_shard_nbytes(shard_size)}
    return export_command.ExportRequest(
        common_options(checkpoint, out, options),
        **limit,
        **select(options, "keep_padding", "true_vocab", "layout", "dtype"),
    )


def _convert(command: str, call: Callable[[Ui], Report], progress: Progress | None) -> Conversion:
    outcome = run_silently(command, call, progress)
    fields: Any = outcome.report.fields
    annotations = conversion_annotations(command)
    return Conversion(
        path=Path(fields["output"]),
        bytes_read=fields["bytes"]["read"],
        bytes_written=fields["bytes"]["written"],
        seconds=outcome.seconds,
        peak_bytes=fields["memory"]["peak"],
        already_done=fields["already"],
        plan_digest=fields["plan_digest"],
        warnings=tuple(to_callers_terms(text, annotations) for text in outcome.warnings),
        details=fields,
    )


def _plan(common: CommonOptions, make: Callable[[Source, LocatedCheckpoint], PlannedConversion]) -> Plan:
    located, source = open_checkpoint(common, silent_ui("plan"))
    return make(source, located).plan
