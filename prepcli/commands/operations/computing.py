"""Compute with the model of a checkpoint: its parameters, its tokenizer, and the processes of a job."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from prepcli.commands.console.notebook import run_observer_of
from prepcli.commands.console.stdio import prepare_jax
from prepcli.commands.operations.checkpoint_options import (
    CommonOptions,
    check_config_option,
    open_checkpoint,
    source_line,
)
from prepcli.core.errors import Option, PrepError, text
from prepcli.core.observer import Observer, Progress
from prepcli.core.option_spec import PathLike
from prepcli.core.process_address import ProcessSettings, process_address
from prepcli.core.unexpected import label_errors
from prepcli.restore.digest_checks import check_without_checksums
from prepcli.sources.generation_config import (
    GENERATION_CONFIG_FILE,
    GenerationDefaults,
    generation_defaults,
)
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.source import Source
from prepcli.stores.paths import fetch_copies, local_copy
from trainer.recipe.tables import Cluster
from trainer.run.params import OpenedModel, open_model
from trainer.run.run import run_together

if TYPE_CHECKING:
    from prepcli.core.process_group import ProcessGroup


def open_params(
    located: LocatedCheckpoint,
    source: Source,
    mesh: str | None,
    *,
    verify: bool,
    observer: Observer,
) -> AbstractContextManager[OpenedModel]:
    """Open the parameters of a located checkpoint for a mesh.

    A checkpoint without checksums gives a warning.
    """
    return open_model(
        source,
        located.files.path,
        mesh,
        verify=verify,
        on_unchecked=lambda: check_without_checksums(source, source.tensors, observer),
    )


@contextmanager
def open_parameters(
    common: CommonOptions, mesh: str | None, *, verify: bool, observer: Observer
) -> Iterator[tuple[LocatedCheckpoint, Source, OpenedModel]]:
    """Locate a checkpoint, note what it is, and open its parameters for a mesh. Close it at the end of the block.

    Raises:
        PrepError: The checkpoint, its options or the devices cannot be used.
    """
    located, source = open_checkpoint(common, observer)
    if common.config is not None:
        check_config_option(source)
    observer.note(source_line(source))
    with open_params(located, source, mesh, verify=verify, observer=observer) as opened:
        yield located, source, opened


def resolve_compute_dtype(dtype: str | None, opened: OpenedModel) -> str:
    """Return the dtype of a computation: the requested one, else bfloat16 if all parameters have it."""
    if dtype is not None:
        return dtype
    return "bfloat16" if opened.stored_dtypes() == {"bfloat16"} else "float32"


# --- Tokenizer, and defaults of generation


def find_source_tokenizer(source: Source) -> Path | None:
    """Return the path of a checkpoint's tokenizer for `load_tokenizer`. None if the checkpoint has no tokenizer."""
    from trainer.data.tokenizer import find_tokenizer

    # Several files share a folder. A dict drops duplicates and, unlike a set, keeps the order of the source.
    files = [file.path for file in source.side_files if file.is_at_top]
    fetch_copies(files)
    folders = dict.fromkeys(local_copy(path).parent for path in files)
    return next(filter(None, map(find_tokenizer, folders)), None)


TOKENIZER_HINT = text("{}", Option("tokenizer", "PATH"))


def tokenizer_path(
    source: Source, option: PathLike | None, *, purpose: str, hint: str = TOKENIZER_HINT
) -> Path:
    """Return the tokenizer of an option, or else of the checkpoint.

    Raises:
        PrepError: There is none.
    """
    path = Path(option) if option is not None else find_source_tokenizer(source)
    if path is None:
        why = f"there is no tokenizer.json or SentencePiece model to {purpose} with"
        raise PrepError(f"{source.display_name} has no tokenizer", why, hint)
    return path


def source_generation_defaults(
    source: Source, vocab: int, *, note: Callable[[str], None] = lambda line: None
) -> GenerationDefaults:
    """Return the end tokens and rules of a checkpoint for generation. See `generation_defaults`."""
    files = [
        local_copy(file.path) for file in source.side_files if file.name == GENERATION_CONFIG_FILE
    ]
    defaults = generation_defaults(source.config, files[0] if files else None, vocab)
    for line in defaults.notes:
        note(line)
    return defaults


# --- All processes of a job


AGAIN_HINT = "start all processes again"

R = TypeVar("R")


def compute_together(
    mesh: str | None,
    progress: Progress | Observer | None,
    *,
    phase: str,
    compute: Callable[[ProcessGroup | None, Observer], R],
) -> R:
    """Connect the processes of a job, and compute in all of them.

    Without a mesh, or in a job of one process, this process computes alone.

    Raises:
        PrepError: The computation failed in this process or in another one.
    """
    observer = run_observer_of(progress)
    address = process_address(ProcessSettings(), os.environ) if mesh is not None else None
    if address is None or address.count == 1:
        return compute(None, observer)
    prepare_jax(observer)
    from trainer.distributed.processes import start_processes

    cluster = Cluster()
    with label_errors(address.index):
        # Two commands at one address would wait for each other's processes: their jobs have different names.
        group = start_processes(
            replace(address, job=address.job or f"prep {phase}"),
            start_timeout_s=cluster.start_timeout,
            heartbeat_timeout_s=cluster.heartbeat_timeout,
        )
        process_observer = observer.for_process(address.index)
        together = run_together(
            group, cluster, process_observer, has_saved_step=lambda: False, hint=AGAIN_HINT
        )
        with together as enter_phase:
            enter_phase(phase)
            return compute(group, process_observer)


def process_index(group: ProcessGroup | None) -> int | None:
    """Return the index of this process in a job, or None outside of a job of several processes."""
    return None if group is None else group.index
