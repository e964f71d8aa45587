"""The checkpoints of a training run, in a folder or in an object store.

A save is a conversion whose source is memory, of one process or of all processes of the run. The place of the run
writes and removes steps, so that each step is complete or invisible.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from prepcli.engine.budget import make_budget
from prepcli.errors import PrepError
from prepcli.execution.background_save import BackgroundSave, FinishedSave
from prepcli.execution.joint_work import joint_work
from prepcli.execution.kept_steps import KeepRule, StepLosses, removable_steps
from prepcli.execution.local_run import LocalRun
from prepcli.execution.run_place import RunPlace, StepSave
from prepcli.execution.step_exports import StepExports
from prepcli.execution.step_writer import MEMORY_NBYTES
from prepcli.formats.file_records import check_files
from prepcli.formats.manifest import PREP_KEYS, find_manifest_folder, read_manifest
from prepcli.planning.plan import Plan, SmallFile
from prepcli.planning.tensors import itemsize
from prepcli.restore.item_reader import ItemReader, open_reader
from prepcli.sources.source import HF_FOLDER, small_files
from prepcli.targets.hf_folder import copied_files, settings_files
from prepcli.targets.training_step import StartModel, plan_training_step
from trainer.distributed.process_group import ProcessGroup, SingleProcess
from trainer.models.checkpoint_store import HostLeaf, LeafSpec, PendingSave

SINGLE = SingleProcess()


class RunFolder:
    """The checkpoints of one run: a CheckpointStore that the processes of one job write at a time."""

    def __init__(
        self,
        place: RunPlace | Path,
        start_checkpoint: Path | StartModel,
        *,
        name: str,
        keep: KeepRule | int | Literal["all"] = "all",
        exports: StepExports | None = None,
        request: str = "prep train",
        config: Mapping[str, Any] | None = None,
        mesh: str | None = None,
        rules: Sequence[str] | None = None,
        scan: bool | None = None,
        scan_axis: int | None = None,
        lora: Mapping[str, Any] | None = None,
        group: ProcessGroup = SINGLE,
        free_memory_nbytes: Callable[[], int | None] = lambda: None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Create the run, lock it, and remove files that killed processes left there.

        Args:
            place: Place of the run, or its local folder.
            start_checkpoint: Checkpoint or model to start or resume from; its settings are the defaults.
            name: Name of the run.
            keep: The steps to keep, or the number of newest ones.
            exports: Exports some of the steps in process 0.
            request: Command line, for the manifest.
            config: Config of the model; None for that of the checkpoint, like the following arguments.
            mesh: Mesh of the saved tree.
            rules: Partition rules.
            scan: Whether layers are stacked.
            scan_axis: Axis of the stacked layers.
            lora: Settings of the adapters, if the steps contain adapters instead of all parameters.
            group: Processes of the run. Process 0 locks the run, and creates and removes steps.
            free_memory_nbytes: Returns the free memory of the host; None if a copy of a state always fits.
            note: Prints a line for the user.

        Raises:
            PrepError: Another process holds the run.
        """
        manifest = self._open_start(start_checkpoint)
        changed_keys = {"config": config, "mesh": mesh, "rules": rules, "scan": scan, "scan_axis": scan_axis}
        changed_keys |= {"lora": lora}
        self._start_manifest = {
            **manifest,
            **{key: value for key, value in changed_keys.items() if value is not None},
            "name": name,
        }
        self._extra_files()  # raises before the first step if a link leaves the checkpoint
        self._place = LocalRun(place) if isinstance(place, Path) else place
        self._keep, self._request = keep if isinstance(keep, KeepRule) else KeepRule(keep), request
        self._losses, self._exports = StepLosses(self._read_manifest), exports
        self._layout: tuple[Mapping[str, LeafSpec], Plan] | None = None
        self._group, self._free_memory_nbytes = group, free_memory_nbytes
        self._pending: BackgroundSave | None = None
        if self._is_first:
            self._place.acquire(note)

    @property
    def _is_first(self) -> bool:
        """Whether this is process 0 of the run."""
        return self._group.index == 0

    def _open_start(self, start_checkpoint: Path | StartModel) -> Mapping[str, Any]:
        """Return the manifest of the start checkpoint, and keep the location of its small files."""
        self._hf_folder: Path | None = None
        self._start_files: tuple[SmallFile, ...] = ()
        if isinstance(start_checkpoint, StartModel):
            self._start_files = start_checkpoint.small_files
            return start_checkpoint.manifest
        with open_reader(start_checkpoint, verify=False) as reader:  # reads the manifest, but no leaf
            self._hf_folder = reader.folder / HF_FOLDER
            # here, and not at the first save: also with `--no-verify`, each step copies these files
            check_files(find_manifest_folder(reader.folder), reader.manifest)
            return reader.manifest

    def _extra_files(self) -> tuple[SmallFile, ...]:
        """Return the tokenizer and other files of the model, from the newest step if there is one."""
        if self._hf_folder is None:
            return self._start_files
        folder = find_manifest_folder(self._hf_folder.parent)
        manifest = read_manifest(folder)
        return copied_files(small_files(self._hf_folder), folder, manifest=manifest, path_prefix=f"{HF_FOLDER}/")

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self._group.count > 1 and self._pending and not self._pending.is_done:
            return  # the other processes have to learn of the error first; the lock ends with this process
        is_reported = error is not None and (self._group.count == 1 or isinstance(error, PrepError))
        try:
            with contextlib.suppress(*((Exception,) if is_reported else ())):
                self._wait_for_save()
            if error is None and self._exports is not None:
                self._exports.wait()
                self._remove_old_steps()
        finally:
            self.close()

    def close(self) -> None:
        """Release the lock of the run."""
        self._place.release()

    def clear(self) -> None:
        """Remove all steps, the last one first: a kill leaves a run that stopped at an earlier step."""
        for step in reversed(self.steps()) if self._is_first else ():
            self._place.remove_step(step)

    def steps(self) -> list[int]:
        """Return the steps with complete checkpoints, ascending."""
        return self._place.steps()

    def open(self, step: int) -> ItemReader:
        """Open the checkpoint of a step; PrepError if it is damaged or missing."""
        return self._place.open_step(step)

    def start_save(self, step: int, leaves: Mapping[str, HostLeaf], manifest_fields: Mapping[str, Any]) -> PendingSave:
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
        if self._has_memory(leaves):
            copies = {name: leaf.on_host() for name, leaf in leaves.items()}
            self._pending = BackgroundSave(partial(self._save, step, copies, manifest_fields))
            return self._pending
        start_s = time.monotonic()
        self._save(step, leaves, manifest_fields)
        return FinishedSave(time.monotonic() - start_s)

    def _has_memory(self, leaves: Mapping[str, HostLeaf]) -> bool:
        """Return whether a copy of the leaves takes at most half of the free memory."""
        free_nbytes = self._free_memory_nbytes()
        copy_nbytes = sum(leaf.num_elements * itemsize(leaf.dtype) for leaf in leaves.values())
        return free_nbytes is None or copy_nbytes <= free_nbytes // 2

    def _wait_for_save(self) -> None:
        """Wait for the save in the background; raise its error."""
        pending, self._pending = self._pending, None
        if pending:
            pending.wait()

    def save(self, step: int, leaves: Mapping[str, HostLeaf], manifest_fields: Mapping[str, Any]) -> None:
        """Save a checkpoint, then remove old steps. An error leaves all other steps complete.

        Args:
            step: A step without a checkpoint.
            leaves: All leaves: parameters (`params.…`), the optimizer state (`opt_state.…`) and the remaining state.
            manifest_fields: Additional keys of the manifest.

        Raises:
            PrepError: The step exists, or cannot be written.
            ValueError: `manifest_fields` has a key that prep writes itself.
        """
        self._wait_for_save()
        self._save(step, leaves, manifest_fields)

    def _save(self, step: int, leaves: Mapping[str, HostLeaf], manifest_fields: Mapping[str, Any]) -> None:
        if reserved := PREP_KEYS & {*manifest_fields}:
            raise ValueError(f"manifest_fields has reserved keys: {', '.join(sorted(reserved))}")
        with joint_work(self._group, f"save-{step}-begun"):
            self._check_new_step(step)
            save = StepSave(step, self._plan(step, leaves, manifest_fields), leaves, self._group)
        self._place.write_step(save)
        self._hf_folder = self._place.model_files_folder(step) or self._hf_folder
        with joint_work(self._group, f"save-{step}-ended"):
            if self._is_first and self._exports is not None:
                self._exports.start(step)
            self._remove_old_steps()

    def _check_new_step(self, step: int) -> None:
        if not (self._is_first and self._place.has_step(step)):
            return
        what = f"{self._place.step_name(step)} exists"
        if step in self._place.steps():
            why = "a saved step is not overwritten, and another process has saved it since this one started"
            raise PrepError(
                what, why, "start again once the other process has ended: the run resumes from its last step"
            )
        raise PrepError(what, "it is not a step that prep saved", "move it away, or save another step")

    def _remove_old_steps(self) -> None:
        if self._keep.newest == "all" or not self._is_first:
            return
        in_use = self._exports.in_use() if self._exports is not None else ()
        for step in removable_steps(self.steps(), self._keep, self._losses, in_use):
            self._place.remove_step(step)

    def _read_manifest(self, step: int) -> Mapping[str, Any]:
        with self._place.open_step(step, verify=False) as reader:
            return reader.manifest

    def best_eval_loss(self, num_sequences: int | None) -> float:
        """Return the lowest loss in the manifest of a step; infinity without one.

        Args:
            num_sequences: Number of sequences of the evaluations to compare.
        """
        best = self._losses.best_steps(self.steps()).get(num_sequences)
        return math.inf if best is None else self._losses.losses[best].value

    def _plan(self, step: int, leaves: Mapping[str, HostLeaf], manifest_fields: Mapping[str, Any]) -> Plan:
        """Return the plan of a save; the part that does not depend on the step is made once."""
        stored = {name: LeafSpec(tuple(leaf.shape), leaf.dtype) for name, leaf in leaves.items()}
        if self._layout is None or self._layout[0] != stored:
            plan = plan_training_step(
                stored,
                self._start_manifest,
                request=self._request,
                slab_nbytes=make_budget(MEMORY_NBYTES).slab_nbytes,
                min_split_nbytes=self._place.min_split_nbytes(self._group),
            )
            self._layout = stored, plan
        plan = self._layout[1]
        small = settings_files(
            plan.settings["config"], (), extra_files=self._extra_files(), path_prefix=f"{HF_FOLDER}/"
        )
        return replace(plan, small_files=small, settings={**plan.settings, **manifest_fields, "step": step})
