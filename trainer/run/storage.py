"""The folder or bucket of a run: its lock and files, the exports of its steps, and what a stop leaves there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from prepcli.core.errors import (
    FAILED,
    INTERRUPTED,
    RESUME_HINT,
    STOPPED,
    Key,
    Option,
    PrepError,
    text,
    usage_error,
)
from prepcli.core.formatting import join_names
from prepcli.core.observer import Observer
from prepcli.engine.digest import record_digest
from prepcli.execution.checkpoint_manager import StepExports
from prepcli.execution.hub_push import check_push, parse_push_target
from prepcli.execution.signals import exit_with_report
from prepcli.execution.training_bucket import BucketStorage
from prepcli.execution.training_folder import FolderStorage
from prepcli.execution.training_storage import TOKENS_FOLDER, RunStorage, joint_work
from prepcli.stores.addresses import is_url, parse_out_url, parse_url
from prepcli.stores.byte_ranges import retry_policy_from_env
from prepcli.stores.files import io_error, write_file
from trainer.data.store import has_shard, is_complete
from trainer.recipe import Recipe
from trainer.run.run import Run, TrainResult

if TYPE_CHECKING:
    from prepcli.core.process_group import ProcessGroup
    from trainer.run.start import StartCheckpoint

RUNS_FOLDER = Path("runs")
# Errors of a read-only file system. A run there cannot be changed, so it needs no lock.
NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
# A converted model, in the folder of a run that an earlier version of prep began
INIT_FOLDER = "init"


def open_run_storage(out: Path | None, recipe: Recipe, observer: Observer) -> RunStorage:
    """Return the storage of a run, without reading or writing there.

    Args:
        out: The value of `--out`.
        recipe: The recipe, for the name of the default folder and the lock of a bucket.
        observer: Receives notes about retried requests.

    Raises:
        UsageError: A URL has another scheme, or is invalid.
    """
    from trainer.data.files import OPENED_PREFIX
    from trainer.distributed.agreement import PROBE_PREFIX

    url = parse_out_url(out)
    if url is None:
        # Earlier versions left the file `lock`.
        tokens = (f"{TOKENS_FOLDER}/{OPENED_PREFIX}*", f"{TOKENS_FOLDER}/lock")
        start_files = (*tokens, INIT_FOLDER, f"{PROBE_PREFIX}*")
        return FolderStorage(out or RUNS_FOLDER / recipe.name, start_files)
    local_folder = RUNS_FOLDER / url.scheme / url.bucket / url.path
    return BucketStorage(
        url, local_folder, retry_policy_from_env(os.environ, observer.note), _recipe_digest(recipe)
    )


def _recipe_digest(recipe: Recipe) -> str:
    """Return the digest of a recipe without the keys that say which process this is."""
    # A restarted job takes the lock of its killed predecessor over at once, because both have the same
    # digest. Their hosts and addresses may differ.
    values = recipe.model_dump(mode="json", exclude={"cluster"})
    return record_digest(json.dumps(values, sort_keys=True).encode())


@contextmanager
def hold_run(
    storage: RunStorage, group: ProcessGroup, note: Callable[[str], None]
) -> Iterator[None]:
    """Hold the lock of a run in process 0, from before its steps are listed until it ends.

    A file system or an object store may have no locks. Therefore `check_last_step` is called before the first change of
    the run.

    Args:
        storage: Storage of the run.
        group: Processes of the run.
        note: Prints a warning if the file system has no locks.

    Raises:
        PrepError: Another process holds the run.
    """
    if group.index > 0:
        yield
        return
    try:
        storage.acquire(note)
    except PrepError as error:
        cause = error.__cause__
        if not (isinstance(cause, OSError) and cause.errno in NOT_WRITABLE):
            raise
        # A finished run on a read-only file system prints its result without a lock. A run with steps to take fails
        # when the checkpoint manager asks for the lock again, before its first write.
    try:
        yield
    except BaseException:
        # BaseException includes signals and KeyboardInterrupt: the lock is released on every exit
        # but a kill.
        storage.release(after_error=True)
        raise
    storage.release()


def check_last_step(storage: RunStorage, step: int) -> None:
    """Check that the last saved step of a run has not changed since it was read, before the first write to the run.

    Args:
        storage: Storage of the run, acquired.
        step: Step to resume from. 0 means a new run.

    Raises:
        PrepError: Another process has saved or removed steps meanwhile.
    """
    # A new listing: without a lock, or after another process took the lock over, the known steps may be out of date.
    last_step = max(storage.steps(), default=0)
    if last_step != step:
        raise _trained_meanwhile_error(storage, step, last_step)


def _trained_meanwhile_error(storage: RunStorage, step: int, last_step: int) -> PrepError:
    """Return the error for a run that another process has trained since this one read its last step."""
    what = f"{storage.name} is at step {last_step}, and this process has read step {step}"
    why = "another process has trained the run meanwhile; nothing was changed"
    # 75 asks a launcher to start the job again. That helps only if there is a step to resume from.
    code = FAILED
    if last_step:
        code = STOPPED
    return PrepError(
        what, why, "start again once it has ended: the run resumes from its last step", code
    )


@contextmanager
def explain_removed_step(storage: RunStorage, step: int) -> Iterator[None]:
    """Replace an error in the `with` block by the error of `check_last_step`, if another process removed the step."""
    try:
        yield
    except PrepError as error:
        if not step:
            raise
        # Another process that trains the run removes old steps, also one that is being read here.
        steps = storage.steps()
        if step not in steps:
            raise _trained_meanwhile_error(storage, step, max(steps, default=0)) from error
        raise


def check_shared_folder(folder: Path, group: ProcessGroup) -> None:
    """Check that all processes see the folder of process 0, which creates it.

    Args:
        folder: The folder.
        group: The processes.

    Raises:
        PrepError: A process has another folder of this name, or process 0 cannot write to it.
    """
    from trainer.distributed.agreement import sees_folder

    is_shared = sees_folder(folder, group)
    with joint_work(group, "folder-seen"):
        if not is_shared:
            what = f"{socket.gethostname()} does not see the run's folder of process 0"
            why = f"{folder.absolute()} is another folder there"
            hint = text("set {} to a folder on a file system that all hosts share", Option("out"))
            raise PrepError(what, why, hint)


def describe_saved_progress(storage: RunStorage) -> str:
    """Describe what the next start of a run continues from.

    Empty without steps and tokens. For example `kept in runs/a: step 40, the tokens`, or for a bucket
    `kept in gs://b/a: step 40; kept in runs/gs/b/a: the tokens`.
    """
    kept: dict[str, list[str]] = {storage.name: []}
    steps = storage.steps(refresh=False)
    if steps:
        kept[storage.name].append(f"step {steps[-1]}")
    tokens = _describe_tokens(storage.local_folder / TOKENS_FOLDER)
    if tokens:
        kept.setdefault(str(storage.local_folder), []).append(tokens)
    texts = [f"kept in {where}: {', '.join(names)}" for where, names in kept.items() if names]
    return "; ".join(texts)


def _describe_tokens(folder: Path) -> str:
    """Describe the tokens in a folder: all, a part of them after a kill, or none (empty)."""
    stores = [path for path in folder.glob("*") if path.is_dir()]
    if any(map(is_complete, stores)):
        return "the tokens"
    if any(map(has_shard, stores)):
        return "a part of the tokens"
    return ""


def write_run_file(run: Run, name: str, text: str) -> None:
    """Replace a file of a run and store it. Raise PrepError if it cannot be written."""
    path = run.folder / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text.encode())
    except OSError as error:
        raise io_error(path, error) from error
    run.storage.store_file(name)


@contextmanager
def store_at_end(storage: RunStorage, name: str) -> Iterator[None]:
    """Store a file of the run at the end. After another error, ignore errors of the store."""
    try:
        yield
    except BaseException:
        # The error of the block is the one to report, and not a failed upload after it.
        with suppress(PrepError):
            storage.store_file(name)
        raise
    storage.store_file(name)


EXPORTS_FOLDER = "exports"  # in the folder of a run


def check_repository(run: Run) -> None:
    """Check in process 0 that the hub accepts an upload, if the recipe names a repository.

    Raises:
        PrepError: The hub would refuse the upload.
    """
    # Process 0 alone uploads. The other hosts need no token of the hub.
    repository = run.recipe.checkpoint.push
    if repository is not None and run.is_process_0:
        target = parse_push_target(repository, private=False)
        check_push(target, retry_policy_from_env(os.environ, run.observer.note))


def step_exports(run: Run) -> StepExports | None:
    """Return the exports of a run in process 0, or None without exports or in another process."""
    every = run.recipe.checkpoint.export_every
    if not every or not run.is_process_0:
        return None

    def export_step(step: int) -> None:
        out = _export_folder(run, step)
        _make_parent(out)
        run.export(run.storage.step_name(step), out, None)

    return StepExports(every, export=export_step, warn=run.observer.warn, say=run.observer.note)


def _export_folder(run: Run, step: int) -> Path:
    return run.folder / EXPORTS_FOLDER / str(step)


def make_missing_exports(run: Run) -> None:
    """Export the due steps of a finished run if a kill has interrupted their exports."""
    exports = step_exports(run)
    if exports is not None:
        exports.start_missing(run.storage.steps())
        exports.wait()


def describe_missing_exports(run: Run, last_step: int) -> str:
    """Describe the missing exports and the missing push of a finished run. The next start makes them.

    Args:
        run: The run.
        last_step: Last step of the run.

    Returns:
        For example `not exported: step 20 and step 40; not pushed to me/model`. Empty before the
        last step, and in every process but process 0.
    """
    checkpoint = run.recipe.checkpoint
    steps = run.storage.steps(refresh=False)
    if not run.is_process_0 or last_step not in steps:
        return ""
    unexported: list[str] = []
    for step in steps:
        # An export has its name only when it is complete, as every output.
        is_due = checkpoint.export_every > 0 and step % checkpoint.export_every == 0
        if is_due and not _export_folder(run, step).exists():
            unexported.append(f"step {step}")
    parts: list[str] = []
    if unexported:
        parts.append(f"not exported: {join_names(unexported)}")
    if checkpoint.push is not None:
        parts.append(f"not pushed to {checkpoint.push}")
    return "; ".join(parts)


def remove_exports(run: Run) -> None:
    """Remove the exports of a run that starts again, in process 0. Raise PrepError if they cannot be removed."""
    if not run.is_process_0:
        return
    # The new run has the same step numbers. `describe_missing_exports` would count an old `exports/20`
    # as the export of the new step 20.
    folder = run.folder / EXPORTS_FOLDER
    try:
        if folder.is_dir():
            shutil.rmtree(folder)
    except OSError as error:
        raise io_error(folder, error) from error


def check_restart_source(start: StartCheckpoint, storage: RunStorage, recipe: Recipe) -> None:
    """Raise UsageError if the recipe names a step or an export of the run, and a restart would delete it."""
    model = recipe.model.path
    root = start.model_root
    if isinstance(root, Path):
        # The step that has the parameters, if `model.path` is a run
        model = str(root)
    sources = {
        "model.path": model,
        "model.config": recipe.model.config,
        "lora.path": recipe.lora.path,
        "data.tokenizer": recipe.data.tokenizer,
    }
    for key, source in sources.items():
        if source is None:
            continue
        if deleted := _deleted_folder(source, storage):
            why = text("the run starts from it: it is the recipe's {}", Key(key))
            what = text("{} would delete {}", Option("restart", True), deleted)
            raise usage_error(what, why, text("use another {}", Key("name")))


def _deleted_folder(source: str, storage: RunStorage) -> str:
    """Return the path or URL of the step or exports above a path or URL. Empty if a restart keeps the path."""
    if is_url(source):
        # The slash keeps `gs://b/run2` from counting as below `gs://b/run`.
        if f"{parse_url(source)}/".startswith(f"{storage.name}/"):
            return source
        return ""
    # The exports of a run in a bucket are on this machine too.
    folders = [str(storage.local_folder / EXPORTS_FOLDER)]
    if storage.is_on_disk:
        folders += map(storage.step_name, storage.steps())
    path = Path(source).expanduser().resolve()
    for folder in folders:
        if path.is_relative_to(Path(folder).resolve()):
            return folder
    return ""


def push_last_step(run: Run, result: TrainResult) -> TrainResult:
    """Export the last step of a finished run and upload it, if the recipe names a repository.

    Args:
        run: The run.
        result: Its result.

    Returns:
        The result, with the repository and the commit if the step was uploaded.

    Raises:
        PrepError: The export or the upload failed. The run is complete.
    """
    repository = run.recipe.checkpoint.push
    if repository is None or not run.is_process_0 or result.error is not None:
        return result
    # The folder stays in the run. If the upload fails, the next start uploads it without a new export.
    out = _export_folder(run, result.step)
    _make_parent(out)
    run.observer.note(f"pushing step {result.step} to {repository}")
    pushed = run.export(run.storage.step_name(result.step), out, repository)
    run.observer.note(f"pushed to {pushed['commit']}")
    return replace(result, pushed=pushed)


def _make_parent(out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise io_error(out.parent, error) from error


def quit_run(run: Run) -> NoReturn:
    """Report a second Ctrl-C, and end the process without the steps since the last saved one."""

    def report() -> int:
        why = describe_saved_progress(run.storage)
        error = PrepError("interrupted", why, RESUME_HINT, INTERRUPTED)
        return run.observer.show_final_error(error)

    exit_with_report(report)


def stopped_error(run: Run, reason: str, *, step: int, steps: int) -> PrepError:
    """Return the error of a run stopped before its end.

    Args:
        run: The run.
        reason: The name of a signal, or a text.
        step: The last step taken.
        steps: Number of the last step of the run.
    """
    why = "no step was completed"
    if run.storage.steps(refresh=False):
        why = f"step {step} is saved"
    if missing := describe_missing_exports(run, steps):
        why = f"{why}; {missing}"
    # 75 asks a launcher to start the job again. After Ctrl-C, the user does not want a restart.
    if reason == signal.Signals.SIGINT.name:
        return PrepError("interrupted", why, RESUME_HINT, INTERRUPTED)
    # Other reasons than signals are texts, e.g. the limit of `stop_after`.
    form = "stopped by {}" if reason.startswith("SIG") else "stopped: {}"
    return PrepError(text(form, reason), why, RESUME_HINT, STOPPED)
