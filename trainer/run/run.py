"""A training run in this process: the options of the user, the storage and the other processes, and the result."""

from __future__ import annotations

import json
import os
import platform
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from prepcli.core.errors import FAILED, INTERRUPTED, STOPPED, Option, PrepError
from prepcli.core.observer import Observer, RunObserver
from prepcli.core.process_address import process_address
from prepcli.core.signals import (
    Interrupted,
    Stopped,
    exit_with_report,
    note_durable_work,
    raise_on_signal,
)
from prepcli.core.unexpected import as_prep_error
from prepcli.engine.digest import record_digest
from prepcli.execution.training_storage import RunStorage
from trainer.recipe import LoadedRecipe, Recipe
from trainer.recipe.key_types import to_toml
from trainer.recipe.tables import is_path, keys_of, value_of
from trainer.training.eval_metrics import NO_TOKEN_FUNCTIONS, TokenFunctions

if TYPE_CHECKING:
    from prepcli.core.process_group import ProcessGroup
    from trainer.distributed.processes import CoordinatedProcesses
    from trainer.distributed.watchdog import JobEnd, Watchdog
    from trainer.recipe.tables import Cluster

# Exports a step to a folder, and uploads it if a repository of the hub is named:
# (path or URL of the step, folder, repository) -> `repo`, `revision` and `commit` of the upload
ExportStep: TypeAlias = Callable[[str, Path, str | None], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """The options of `prep train`."""

    recipe: Path  # as the user named it
    # Folder or URL of the run. The default is `runs/NAME`.
    out: Path | None = None
    restart: bool = False  # delete the run's steps and start again
    stop_after: int = 0  # steps in this process, 0 for all
    dry_run: bool = False
    offline: bool = False
    stream: bool = False  # read a hub model without a local copy
    # Check the start checkpoint against its checksums.
    verify: bool = True
    token_functions: TokenFunctions = NO_TOKEN_FUNCTIONS  # a user's loss and metrics
    # Start even if the memory estimate of a step exceeds the device memory.
    force: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """A run in this process, from the time when the processes are connected."""

    loaded: LoadedRecipe  # The recipe, and the origins of its values
    options: TrainSettings  # The options of the user
    storage: RunStorage  # Folder or bucket of the run
    group: ProcessGroup  # Processes of the run
    observer: RunObserver  # Receives notes, warnings and progress of this process
    export: ExportStep  # Exports a step
    # Sets the phase of this process, such as `load` or `step 12`, for the watchdog of the run
    enter_phase: Callable[[str], None]
    processes_per_host: int  # Largest number of processes of the run on one host
    # Why process 0 could not lock a run that it may only read. None if it has the lock, and in a dry run.
    lock_error: PrepError | None = None

    @property
    def recipe(self) -> Recipe:
        """Recipe of the run."""
        return self.loaded.recipe

    @property
    def folder(self) -> Path:
        """Folder of the run's files on this machine."""
        return self.storage.local_folder

    @property
    def is_process_0(self) -> bool:
        """Whether this is process 0, which alone writes the files that all processes share."""
        return self.group.index == 0


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Result of a run in one process."""

    run: str  # Path or URL of the run
    output: str | None  # Path or URL of the last saved step. None without one.
    step: int  # The last step taken
    steps: int  # Number of the recipe's last step
    resumed_at: int  # Step that the run resumed from. 0 means a new run.
    mesh: str  # Mesh of the run
    attention_kernel: str  # Name of the attention kernel
    # Metrics of the last step and of the last evaluation. Empty if no step was taken.
    metrics: Mapping[str, object] = field(default_factory=dict[str, object])
    # Memory estimate of a dry run in bytes. None without a dry run.
    memory: Mapping[str, int | None] | None = None
    # Repository, revision and commit of the upload of the last step. None without one.
    pushed: Mapping[str, str] | None = None
    # Why the run ended before the recipe's last step, by `eval.patience`. Empty if it did not.
    end_reason: str = ""
    # Why the run was stopped before its end. None if it is finished.
    error: PrepError | None = None
    # Index of this process in a job of several. None in a run of one process.
    process: int | None = None
    # Whether a dry run has found a run that has ended
    is_finished: bool = False


# The processes of a run: their connection, the comparison of their settings, and their common end.

COMPARED_PACKAGES = ("prepcli", "jax", "jaxlib", "numpy")
# Only these keys of `cluster` must be equal in all processes.
SHARED_CLUSTER_KEYS = ("cluster.dcn_mesh",)
CHECKPOINT_CONTENTS = ("config", "tensors", "slots", "others", "step")  # keys of a manifest
START_HINT = "start every process with the same prep, recipe and options"
FILES_HINT = "every process must read the same files, for example from a shared file system"
INTERRUPT = "SIGINT"
# In errors of XLA's collectives (gloo, NCCL, the network of TPUs) and of the coordination service
CONNECTION_WORDS = (
    "UNAVAILABLE",
    "ABORTED",
    "DEADLINE_EXCEEDED",
    "Gloo",
    "gloo",
    "NCCL",
    # Without the first letter: messages begin it with either case.
    "onnection",
    "ocket",
    "peer",
)
RESTART_HINT = "start all processes again; the run resumes from its last saved step"
NO_STEP_HINT = "start all processes again; no step is saved"


def connect_processes(recipe: Recipe) -> ProcessGroup:
    """Connect the processes of a run.

    Raises:
        PrepError: A process did not start in time.
    """
    from trainer.distributed.processes import request_local_devices, start_processes

    if recipe.cluster.n_local_devices is not None:
        request_local_devices(recipe.cluster.n_local_devices)
    cluster = recipe.cluster
    address = process_address(cluster.process_settings, os.environ)
    if address is not None:
        job = address.job or f"recipe {recipe.name}"
        address = replace(
            address,
            job=job,
            settings_digest=record_digest(
                json.dumps(_recipe_values(recipe), sort_keys=True).encode()
            ),
        )
    return start_processes(
        address,
        start_timeout_s=cluster.start_timeout,
        heartbeat_timeout_s=cluster.heartbeat_timeout,
    )


def process_number(group: ProcessGroup) -> int | None:
    """Return the index of this process in a job of several. None in a run of one process."""
    if group.count == 1:
        return None
    return group.index


def compare_settings(
    group: ProcessGroup, recipe: Recipe, options: TrainSettings, observer: Observer
) -> None:
    """Compare the versions, recipes and options of all processes.

    Args:
        group: Processes of the run.
        recipe: Recipe of this process.
        options: Options of this process.
        observer: Receives a warning about clocks that differ.

    Raises:
        PrepError: The processes differ.
    """
    from trainer.distributed.agreement import check_agreement

    facts = {"python": platform.python_version()}
    for name in COMPARED_PACKAGES:
        facts[name] = metadata.version(name)
    facts |= _recipe_values(recipe)
    # If one process had another value, the others would wait for it in a collective forever. For example,
    # a dry run ends before the first step.
    shared = {
        "restart": (Option("restart", True), options.restart),
        "stop_after": (Option("stop_after"), options.stop_after),
        "dry_run": (Option("dry_run", True), options.dry_run),
        "stream": (Option("stream", True), options.stream),
        "no_verify": (Option("verify", False), not options.verify),
    }
    for name, (_, value) in shared.items():
        facts[name] = str(value)
    facts |= options.token_functions.names
    labels = {name: option for name, (option, _) in shared.items()}
    check_agreement(group, facts, hint=START_HINT, options=labels, warn=observer.warn)


def compare_start(
    group: ProcessGroup, manifest: Mapping[str, Any], *, step: int, data_identity: str, kernel: str
) -> None:
    """Compare the start checkpoint and the data of all processes, before the first step.

    Args:
        group: Processes of the run.
        manifest: Manifest of the start checkpoint, with the digests of its tensors.
        step: Step to resume from. 0 means a new run.
        data_identity: Digest of the tokens.
        kernel: Attention kernel, which each process checks on its own devices.

    Raises:
        PrepError: Processes read different checkpoints or data.
    """
    from trainer.distributed.agreement import check_agreement

    contents = {key: manifest[key] for key in CHECKPOINT_CONTENTS if key in manifest}
    checkpoint = record_digest(json.dumps(contents, sort_keys=True).encode())
    facts = {
        "last step": str(step),
        "start checkpoint": checkpoint,
        "data": data_identity,
        "attention kernel": kernel,
    }
    check_agreement(group, facts, hint=FILES_HINT)


def _recipe_values(recipe: Recipe) -> dict[str, str]:
    """Return the values of the recipe's keys, without paths. The contents of the files are compared instead."""
    return {key: to_toml(value_of(recipe, key)) for key in keys_of(recipe) if _is_shared(key)}


def _is_shared(key: str) -> bool:
    # Paths may differ between hosts. The keys of `cluster` that identify a process differ too.
    return not is_path(key) and (not key.startswith("cluster.") or key in SHARED_CLUSTER_KEYS)


@contextmanager
def run_together(
    group: ProcessGroup,
    cluster: Cluster,
    observer: RunObserver,
    *,
    has_saved_step: Callable[[], bool],
    describe_durable: Callable[[], str] = lambda: "",
    hint: str = NO_STEP_HINT,
) -> Iterator[Callable[[str], None]]:
    """Let the processes of a job end together: if one process fails in the `with` block, all of them end.

    At the end of the block, wait for the other processes.

    Args:
        group: Processes of the job.
        cluster: Deadlines of the job.
        observer: Shows the error if another process ends the job.
        has_saved_step: Returns whether the run can be resumed.
        describe_durable: Returns a description of the work that a later run continues from, for the
            message of a signal that ends the wait. Empty if there is none.
        hint: Hint of errors if the run cannot be resumed.

    Yields:
        A function that sets the phase of this process, such as `load` or `step 12`.

    Raises:
        PrepError: The connection to the other processes is broken.
    """
    from trainer.distributed.processes import CoordinatedProcesses
    from trainer.distributed.watchdog import Watchdog, WatchSettings

    if not isinstance(group, CoordinatedProcesses):
        yield lambda _: None
        return
    watchdog = Watchdog(
        group,
        WatchSettings(cluster.heartbeat_timeout, cluster.step_timeout, group.places),
        is_broken=group.errors.reported.is_set,
        on_end=lambda end: _end_process(end, observer, has_saved_step, hint=hint),
    )
    watchdog.start()
    try:
        yield watchdog.enter
        watchdog.enter("end")
        with raise_on_signal(), note_durable_work(describe_durable):
            _wait_for_all(group)
    except BaseException as raised:
        error = _wait_for_cause(raised, watchdog, has_saved_step, hint=hint)
        _end_job(error, group, watchdog)
        if error is raised:
            raise
        raise error from raised
    watchdog.close()
    if group.is_owner:
        group.disconnect()


def _wait_for_all(group: ProcessGroup) -> None:
    """Wait in a thread until all processes end: Python handles no signal during a wait of the coordination service."""
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            group.barrier("end")
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _wait_for_cause(
    error: BaseException, watchdog: Watchdog, has_saved_step: Callable[[], bool], *, hint: str
) -> BaseException:
    """Return the error to report for an error of this process."""
    # After a broken connection the watchdog may end this process instead, with a message about the lost process.
    from jax.errors import JaxRuntimeError

    from trainer.distributed.processes import ConnectionBrokenError

    # JAX has no exception type for a broken connection. Only the text distinguishes it from a bug.
    is_connection = isinstance(error, JaxRuntimeError) and any(
        word in str(error) for word in CONNECTION_WORDS
    )
    if not (is_connection or isinstance(error, ConnectionBrokenError)):
        return error
    # If a process is lost, the watchdog ends this process here: its message names the lost one.
    watchdog.wait_for_end()
    what = "the devices of the processes cannot exchange data"
    why = str(error).partition("\n")[0]
    if has_saved_step():
        return PrepError(what, why, RESTART_HINT, STOPPED)
    return PrepError(what, why, hint, FAILED)


def _end_job(error: BaseException, group: CoordinatedProcesses, watchdog: Watchdog) -> None:
    """Tell the other processes why this one ends, and make it end without them."""
    from trainer.distributed.watchdog import JobEnd

    if isinstance(error, Stopped | Interrupted | KeyboardInterrupt):
        reason = INTERRUPT
        code = INTERRUPTED
        if isinstance(error, Stopped):
            reason = error.signal_name
            code = STOPPED
        what = f"stopped by {reason} of process {group.index}"
        end = JobEnd("stopped", group.index, what, reason)
    else:
        reported = as_prep_error(error)
        why = " - ".join(text for text in (reported.what, reported.why) if text)
        what = f"process {group.index} ({group.places[group.index]}) failed"
        code = reported.code
        end = JobEnd("failed", group.index, what, why, code)
    # The reason first: the others would report a lost process if this one left before it is known.
    watchdog.end_job(end)
    group.exit_without_disconnecting(code)


def _end_process(
    end: JobEnd, observer: RunObserver, has_saved_step: Callable[[], bool], *, hint: str
) -> NoReturn:
    """Print why another process ended the job, and exit at once."""
    exit_with_report(lambda: observer.show_final_error(_job_error(end, has_saved_step, hint=hint)))


def _job_error(
    end: JobEnd, has_saved_step: Callable[[], bool], *, hint: str = NO_STEP_HINT
) -> PrepError:
    """Return the error of a process that another one ended."""
    code = FAILED
    if has_saved_step():
        hint = RESTART_HINT
        code = STOPPED
    if end.kind == "stopped":
        code = STOPPED
        if end.why == INTERRUPT:
            code = INTERRUPTED
        return PrepError(end.what, "", hint, code)
    # With 75 a launcher would start the job again, and the error would repeat.
    return PrepError(end.what, end.why, hint, end.code or code)
