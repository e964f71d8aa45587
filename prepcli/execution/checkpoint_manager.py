"""The checkpoints of a training run: saves and exports in the background, and rules for the steps to keep."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal

from prepcli.core.errors import PrepError
from prepcli.core.intervals import is_due
from prepcli.core.process_group import ProcessGroup, SingleProcess
from prepcli.core.unexpected import as_prep_error
from prepcli.engine.blobs import HostLeaf
from prepcli.engine.budget import make_budget
from prepcli.execution.training_storage import (
    MEMORY_NBYTES,
    RunStorage,
    StepSave,
    joint_work,
    write_step,
)
from prepcli.formats.manifest import (
    NO_MANIFEST,
    STATE_ITEM,
    check_files,
    find_manifest_folder,
    read_manifest,
)
from prepcli.formats.step_scores import ScoreGroup, StepScore, best_steps, manifest_score
from prepcli.models.partition import MIN_SPLIT_NBYTES
from prepcli.planning.manifest_fields import PREP_KEYS, Manifest
from prepcli.planning.plan import Plan, SmallFile
from prepcli.planning.tensors import LeafSpec, itemsize
from prepcli.restore.item_reader import ItemReader, open_reader
from prepcli.sources.side_files import find_side_files
from prepcli.sources.source import HF_FOLDER
from prepcli.stores.paths import AnyPath
from prepcli.targets.hf_folder import copied_files, settings_files
from prepcli.targets.orbax_item import StartModel, plan_training_step

SINGLE = SingleProcess()
REQUEST = "prep train"  # the command in the manifest of each step


@dataclass(frozen=True, slots=True)
class KeepRule:
    """The steps to keep.

    Attributes:
        newest: Number of steps to keep, the newest ones.
        milestones: Keep all multiples of this number. 0 keeps no milestones.
        best: Keep the step with the best evaluation in its manifest, for each metric and number of sequences.
    """

    newest: int | Literal["all"] = "all"
    milestones: int = 0
    best: bool = False


class CheckpointManager:
    """Saves, opens and removes the checkpoints of one run, in a folder or in an object store.

    The policy:

    - A save copies the state to host memory, and only this copy blocks the training steps. A thread writes the copy.
      If less than twice the memory of the copy is free, the step is written at once instead, leaf by leaf.
    - One save is in progress at a time. The next one waits for it, and raises its error.
    - A step is visible to readers only when all its files are durable and checked. In a run of several processes it is
      visible for all or for none.
    - After a save, old steps are removed: all but the `newest` ones, the milestones, the step with the best
      evaluation, and steps whose export has not ended. A step is removed after the new one is durable, so that a
      kill at any time leaves a step to resume from.
    - An existing step is never overwritten.

    Process 0 creates, exports and removes steps. The caller holds the lock of the run (`trainer.run.storage.hold_run`).
    """

    def __init__(
        self,
        storage: RunStorage,
        start_checkpoint: AnyPath | StartModel,
        *,
        name: str,
        keep: KeepRule | int | Literal["all"] = "all",
        exports: StepExports | None = None,
        manifest_changes: Manifest = NO_MANIFEST,
        group: ProcessGroup = SINGLE,
        free_memory_nbytes: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Read the settings of the start checkpoint. Nothing is written.

        Args:
            storage: Storage of the run.
            start_checkpoint: Checkpoint or model to start or resume from. Its settings are the
                defaults.
            name: Name of the run.
            keep: The steps to keep, or the number of newest ones.
            exports: Exports some of the steps in process 0.
            manifest_changes: Entries of the steps' manifests that replace the start checkpoint's, such as `config`,
                `mesh`, `rules` or `lora`.
            group: Processes of the run.
            free_memory_nbytes: Returns the free memory of the host, or None if a copy of a state
                always fits.

        Raises:
            PrepError: The start checkpoint cannot be read, or has a file outside of its folder.
        """
        self._hf_folder: AnyPath | None = None
        self._start_files: tuple[SmallFile, ...] = ()
        self._start_manifest = (
            self._open_start(start_checkpoint) | Manifest(name=name) | manifest_changes
        )
        # Read the files once before the first step: a link that leaves the checkpoint is an error now, not at a save.
        self._extra_files()
        self._storage = storage
        self._keep = keep if isinstance(keep, KeepRule) else KeepRule(keep)
        self._scores = StepScores(self._read_manifest)
        self._exports = exports
        self._layout: tuple[Mapping[str, LeafSpec], Plan] | None = None
        self._group = group
        self._free_memory_nbytes = free_memory_nbytes
        self._pending: BackgroundSave | None = None

    @property
    def _is_first(self) -> bool:
        """Whether this is process 0 of the run."""
        return self._group.index == 0

    def _open_start(self, start_checkpoint: AnyPath | StartModel) -> Manifest:
        """Return the manifest of the start checkpoint, and keep the location of its small files."""
        if isinstance(start_checkpoint, StartModel):
            self._start_files = start_checkpoint.small_files
            return start_checkpoint.manifest
        # The reader reads the manifest, but no leaf.
        with open_reader(start_checkpoint, verify=False) as reader:
            self._hf_folder = reader.folder / HF_FOLDER
            # Each step copies these files, also in a run that does not verify the parameters it starts from.
            check_files(find_manifest_folder(reader.folder), reader.manifest)
            return reader.manifest

    def _extra_files(self) -> tuple[SmallFile, ...]:
        """Return the tokenizer and other files of the model, from the newest step if there is one."""
        if self._hf_folder is None:
            return self._start_files
        folder = find_manifest_folder(self._hf_folder.parent)
        manifest = read_manifest(folder)
        return copied_files(
            find_side_files(self._hf_folder).copied,
            folder,
            manifest=manifest,
            path_prefix=f"{HF_FOLDER}/",
        )

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        is_saving = self._pending is not None and not self._pending.is_done
        if error is not None and self._group.count > 1 and is_saving:
            # A save of several processes ends only if all of them take part. They first have to learn of the error, so
            # this process does not wait. The thread may still write: the run stays locked until the process ends.
            return
        # If the block and the save both failed, the error of the block is raised.
        is_reported = error is not None and (self._group.count == 1 or isinstance(error, PrepError))
        ignored = (Exception,) if is_reported else ()
        with contextlib.suppress(*ignored):
            self._wait_for_save()
        if error is None and self._exports is not None:
            # The last save could not remove a step that was still exported, so old steps are removed once more
            # afterwards.
            self._exports.wait()
            self._remove_old_steps()

    def remove_all_steps(self) -> None:
        """Remove all steps, the last one first: a kill leaves a run with the earlier steps."""
        if not self._is_first:
            return
        for step in reversed(self.steps()):
            self._storage.remove_step(step)

    def steps(self) -> list[int]:
        """Return the steps with complete checkpoints, ascending."""
        return self._storage.steps()

    def open(self, step: int) -> ItemReader:
        """Open the checkpoint of a step. Raise PrepError if it is damaged or missing."""
        return self._storage.open_step(step)

    def start_save(
        self, step: int, leaves: Mapping[str, HostLeaf], manifest_fields: Mapping[str, object]
    ) -> BackgroundSave | FinishedSave:
        """Copy the leaves to host memory, and save them in the background.

        If less than twice the memory of the copy is free, the step is saved before the return instead, and each leaf
        is fetched when it is written.

        Args:
            step: A step without a checkpoint.
            leaves: All leaves, with the shards of this process.
            manifest_fields: Additional keys of the manifest.

        Returns:
            The save. All processes of the run start the same saves.

        Raises:
            PrepError: An earlier save failed, or the step cannot be written.
            ValueError: `manifest_fields` has a key that prep writes itself.
        """
        self._wait_for_save()
        free_nbytes = self._free_memory_nbytes()
        # `num_elements` counts only the shards of this process: 7e9 float32 parameters with two AdamW moments take 84
        # GB, and 10.5 GB on each of 8 processes that share them.
        copy_nbytes = sum(leaf.num_elements * itemsize(leaf.dtype) for leaf in leaves.values())
        if free_nbytes is None or copy_nbytes <= free_nbytes // 2:
            # The next training step donates the buffers of the state. All shards must be on the host before this method
            # returns.
            copies = {name: leaf.on_host() for name, leaf in leaves.items()}
            # The thread may still work when an error ends the run.
            self._storage.is_saving = True
            self._pending = BackgroundSave(partial(self._save, step, copies, manifest_fields))
            return self._pending
        start_s = time.monotonic()
        self._save(step, leaves, manifest_fields)
        return FinishedSave(time.monotonic() - start_s)

    def _wait_for_save(self) -> None:
        """Wait for the save in the background, and raise its error."""
        pending = self._pending
        self._pending = None
        if pending:
            pending.wait()

    def save(
        self, step: int, leaves: Mapping[str, HostLeaf], manifest_fields: Mapping[str, object]
    ) -> None:
        """Save a checkpoint, then remove old steps. An error leaves all other steps complete.

        Args:
            step: A step without a checkpoint.
            leaves: Parameters (`params.…`), the optimizer state (`opt_state.…`) and the remaining state.
            manifest_fields: Additional keys of the manifest.

        Raises:
            PrepError: The step exists, or cannot be written.
            ValueError: `manifest_fields` has a key that prep writes itself.
        """
        self._wait_for_save()
        self._save(step, leaves, manifest_fields)

    def _save(
        self, step: int, leaves: Mapping[str, HostLeaf], manifest_fields: Mapping[str, object]
    ) -> None:
        self._storage.is_saving = True
        try:
            self._save_step(step, leaves, manifest_fields)
        finally:
            self._storage.is_saving = False

    def _save_step(
        self, step: int, leaves: Mapping[str, HostLeaf], manifest_fields: Mapping[str, object]
    ) -> None:
        if reserved := PREP_KEYS & {*manifest_fields}:
            raise ValueError(f"manifest_fields has reserved keys: {', '.join(sorted(reserved))}")
        # An error of process 0 in this block ends the save in all processes. Otherwise the others would wait for a step
        # that process 0 never creates.
        with joint_work(self._group, f"save-{step}-begun"):
            self._check_new_step(step)
            save = StepSave(
                step, self._plan_step(step, leaves, manifest_fields), leaves, self._group
            )
        with self._storage.step_output(save) as output:
            write_step(output)
        if self._storage.is_on_disk:
            # Later steps copy the small files of this step, so that the start checkpoint may be deleted. A bucket's
            # files would have to be downloaded: there the start checkpoint stays in use.
            self._hf_folder = Path(self._storage.step_name(step)) / STATE_ITEM / HF_FOLDER
        with joint_work(self._group, f"save-{step}-ended"):
            if self._is_first and self._exports is not None:
                self._exports.start(step)
            self._remove_old_steps()

    def _check_new_step(self, step: int) -> None:
        """Raise PrepError if something has the name of the step: a saved step, or a file of the user."""
        if not self._is_first:
            return
        name = self._storage.step_name(step)
        if step in self._storage.steps():
            why = "a saved step is not overwritten, and another process has saved it since this one started"
            hint = (
                "start again once the other process has ended: the run resumes from its last step"
            )
            raise PrepError(f"{name} exists", why, hint)
        if self._storage.is_on_disk and os.path.lexists(name):
            why = "it is not a step that prep saved"
            raise PrepError(f"{name} exists", why, "move it away, or save another step")

    def _remove_old_steps(self) -> None:
        if self._keep.newest == "all" or not self._is_first:
            return
        in_use = self._exports.in_use() if self._exports is not None else ()
        # The new step is durable here. A kill between two removals leaves more steps than the rule keeps. The next save
        # removes them.
        for step in removable_steps(self.steps(), self._keep, self._scores, in_use):
            self._storage.remove_step(step)

    def _read_manifest(self, step: int) -> Manifest:
        with self._storage.open_step(step, verify=False) as reader:
            return reader.manifest

    def note_evaluations(self, metric: str, costs: Mapping[int, float]) -> None:
        """Count evaluations of saved steps whose manifests lack them. See `StepScore.completed`.

        Args:
            metric: Name of the metric.
            costs: Cost of each evaluation, by step.
        """
        if self._is_first:
            self._scores.complete(self.steps(), metric, costs)

    def lowest_cost(self, group: ScoreGroup) -> float:
        """Return the lowest cost of the saved steps, or infinity if none has one.

        Args:
            group: The metric and the evaluated sequences. Other steps are ignored, because they cannot be compared.
        """
        best = self._scores.best_steps(self.steps()).get(group)
        return math.inf if best is None else self._scores.scores[best].cost

    def _plan_step(
        self, step: int, leaves: Mapping[str, HostLeaf], manifest_fields: Mapping[str, object]
    ) -> Plan:
        """Return the plan of a save. Its part without the step number is made once."""
        stored = {name: LeafSpec(tuple(leaf.shape), leaf.dtype) for name, leaf in leaves.items()}
        # Shapes and dtypes are equal in all steps of a run, so a long run plans once. The small files and the step
        # number differ between steps and are added below.
        if self._layout is None or self._layout[0] != stored:
            shares_objects = self._group.count > 1 and not self._storage.is_on_disk
            plan = plan_training_step(
                stored,
                self._start_manifest,
                request=REQUEST,
                slab_nbytes=make_budget(MEMORY_NBYTES).slab_nbytes,
                # Processes write parts of the same file on disk, but not of the same object: in a bucket each chunk
                # belongs to one process.
                min_split_nbytes=0 if shares_objects else MIN_SPLIT_NBYTES,
            )
            self._layout = stored, plan
        plan = self._layout[1]
        small = settings_files(
            plan.settings.config,
            extra_files=self._extra_files(),
            path_prefix=f"{HF_FOLDER}/",
        )
        # `_save` has checked that the trainer's keys are none of prep's.
        settings = plan.settings | manifest_fields | Manifest(step=step)
        return replace(plan, small_files=small, settings=settings)


@dataclass(slots=True)
class StepScores:
    """Evaluations of steps, from their manifests or from the log. Each manifest is read once.

    Attributes:
        read_manifest: Reads the manifest of a step.
        scores: Evaluations of the steps read so far.
    """

    read_manifest: Callable[[int], Manifest]
    scores: dict[int, StepScore] = field(default_factory=dict)

    def best_steps(self, steps: Sequence[int]) -> dict[ScoreGroup, int]:
        """Return the best step of each group. See `manifest.best_steps`."""
        self._read(steps)
        return best_steps({step: self.scores[step] for step in steps})

    def complete(self, steps: Sequence[int], metric: str, costs: Mapping[int, float]) -> None:
        """Add the costs of evaluations that the manifests of steps lack. See `StepScore.completed`."""
        evaluated = [step for step in steps if step in costs]
        self._read(evaluated)
        for step in evaluated:
            self.scores[step] = self.scores[step].completed(metric, costs[step])

    def _read(self, steps: Sequence[int]) -> None:
        for step in steps:
            # A saved step is never overwritten, so a value that was read once stays valid.
            if step not in self.scores:
                self.scores[step] = manifest_score(self.read_manifest(step))


def removable_steps(
    steps: Sequence[int], rule: KeepRule, scores: StepScores, in_use: Collection[int] = ()
) -> list[int]:
    """Return the steps to remove, e.g. [10, 20] of [10, 20, 30] with `KeepRule(newest=1)`.

    Args:
        steps: All steps, ascending.
        rule: The steps to keep.
        scores: Evaluations of the steps.
        in_use: Further steps to keep for now.
    """
    if rule.newest == "all":
        return []
    old: list[int] = []
    # Steps [10, 20, 30] with newest=2: [:-2] leaves [10]. Recipes do not allow newest=0: [:-0] is empty and would keep
    # every step.
    for step in steps[: -rule.newest]:
        if not is_due(step, rule.milestones):
            old.append(step)
    # Manifests are read only if a step may be removed.
    kept = set(in_use)
    if rule.best and old:
        kept.update(scores.best_steps(steps).values())
    return [step for step in old if step not in kept]


@dataclass(frozen=True, slots=True)
class FinishedSave:
    """A save that is complete. It took `seconds`."""

    seconds: float
    is_done = True

    def wait(self) -> float:
        """Return the duration of the save in seconds, at once."""
        return self.seconds


class BackgroundSave:
    """A save in its own thread. A process that ends by an error does not wait for it."""

    def __init__(self, save: Callable[[], None]) -> None:
        """Start the thread."""
        self._save = save
        # Not the end of the thread: Python 3.11 counts a thread as ended once an exception interrupts a `join` of it.
        self._seconds: Future[float] = Future()
        threading.Thread(target=self._run_save, name="prep-save", daemon=True).start()

    def _run_save(self) -> None:
        start_s = time.monotonic()
        try:
            self._save()
        # Python only prints an exception that ends a thread. `wait` raises it in the training loop instead.
        except BaseException as error:
            self._seconds.set_exception(error)
        else:
            self._seconds.set_result(time.monotonic() - start_s)

    @property
    def is_done(self) -> bool:
        """Whether the save has ended, also by an error."""
        return self._seconds.done()

    def wait(self) -> float:
        """Wait until the checkpoint is durable.

        Return the seconds of the save, or raise its error.
        """
        return self._seconds.result()


class StepExports:
    """Exporter of the steps that are multiples of an interval. It exports one step at a time."""

    def __init__(
        self,
        every: int,
        *,
        export: Callable[[int], object],
        warn: Callable[[str], None],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Set the interval. The thread starts with the first export.

        Args:
            every: Steps between two exports.
            export: Exports a step. Has no effect if its export is complete.
            warn: Called with a message for a step whose export failed, which does not end the run.
            say: Called with a message about the exports that `wait` waits for.
        """
        self._every = every
        self._export = export
        self._warn = warn
        self._say = say
        self._queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._waiting: set[int] = set()
        self._thread: threading.Thread | None = None
        self._is_abandoned = False

    def start(self, step: int) -> None:
        """Export a step in the background if it is due."""
        if not is_due(step, self._every) or self._is_abandoned:
            return
        # Before the queue: the thread may end a short export at once, and its `discard` must come after this `add`.
        # Otherwise the step would count as in use forever.
        self._waiting.add(step)
        self._queue.put(step)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._export_steps, name="prep-export", daemon=True
            )
            self._thread.start()

    def start_missing(self, steps: Iterable[int]) -> None:
        """Export the due steps of an earlier process. A kill may have interrupted their exports."""
        for step in steps:
            self.start(step)

    def in_use(self) -> Collection[int]:
        """Return the steps of waiting and running exports."""
        # A copy, because the thread discards steps while the caller iterates.
        return frozenset(self._waiting)

    def abandon(self) -> None:
        """Start no further export, and do not wait for the present one.

        The next start of the run makes the missing exports.
        """
        self._is_abandoned = True
        # None wakes the thread from `get`. The thread is a daemon, so the process may end in the middle of an export.
        self._queue.put(None)
        self._thread = None

    def wait(self) -> None:
        """Wait until all exports have ended, unless they are abandoned."""
        if self._thread is not None:
            if steps := sorted(self.in_use()):
                self._say(
                    f"exporting step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
                )
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _export_steps(self) -> None:
        while (step := self._queue.get()) is not None and not self._is_abandoned:
            try:
                self._export(step)
            except Exception as raised:
                # Otherwise the error would end the thread, and no later step would be exported.
                error = as_prep_error(raised)
                self._warn(
                    f"step {step} was not exported: {error.what}{f' - {error.why}' if error.why else ''}"
                )
            finally:
                # Also after a failed export: otherwise a step that cannot be exported would never be removed.
                self._waiting.discard(step)
