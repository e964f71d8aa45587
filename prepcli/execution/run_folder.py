"""The folder of a training run: one checkpoint per saved step, `STEP/state/` with `STEP/prep-manifest.json`.

A save is a conversion whose source is memory. It is staged as `STEP.partial` and renamed once it is durable. An old
step is renamed to `STEP.removed.partial` before it is deleted, so a folder called
STEP is always complete.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from prepcli.console.progress import NullProgress
from prepcli.engine import pipeline
from prepcli.engine.budget import make_budget
from prepcli.engine.files import io_error
from prepcli.engine.host_leaves import HostLeafReader
from prepcli.errors import PrepError
from prepcli.execution.block_checksums import checksum_recorder
from prepcli.execution.execute import check_free_space, identify_run, open_sink
from prepcli.execution.finalize import finalize_output
from prepcli.execution.locks import acquire_lock
from prepcli.execution.paths import fsync_path, remove_path
from prepcli.execution.staging import open_staging, remove_work_folder
from prepcli.formats.manifest import PREP_KEYS, STATE_ITEM
from prepcli.formats.run_steps import saved_steps, step_folder
from prepcli.planning.plan import Plan, SmallFile
from prepcli.restore.item_reader import ItemReader, open_reader
from prepcli.sources.source import HF_FOLDER, small_files
from prepcli.targets.hf_folder import copied_files, settings_files
from prepcli.targets.training_step import StartModel, plan_training_step
from trainer.models.checkpoint_store import HostLeaf, LeafSpec

LOCK = ".lock"
MEMORY_NBYTES = 256 << 20  # budget of a save, without the leaf that is fetched
LEFTOVER_NAME = re.compile(r"(0|[1-9][0-9]*)(\.removed)?\.partial")


class RunFolder:
    """The checkpoints of one run: a CheckpointStore that one process writes at a time."""

    def __init__(
        self,
        run_folder: Path,
        start_checkpoint: Path | StartModel,
        *,
        name: str,
        keep: int | Literal["all"] = "all",
        request: str = "prep train",
        config: Mapping[str, Any] | None = None,
        mesh: str | None = None,
        rules: Sequence[str] | None = None,
        scan: bool | None = None,
        scan_axis: int | None = None,
    ) -> None:
        """Create the folder, lock it, and remove files that killed processes left there.

        Args:
            run_folder: Folder of the run.
            start_checkpoint: Checkpoint or model to start or resume from; its settings are the defaults.
            name: Name of the run.
            keep: Number of steps to keep.
            request: Command line, for the manifest.
            config: Config of the model; None for that of the checkpoint, like the following arguments.
            mesh: Mesh of the saved tree.
            rules: Partition rules.
            scan: Whether layers are stacked.
            scan_axis: Axis of the stacked layers.

        Raises:
            PrepError: Another process holds the run.
        """
        manifest = self._open_start(start_checkpoint)
        changed_keys = {"config": config, "mesh": mesh, "rules": rules, "scan": scan, "scan_axis": scan_axis}
        self._start_manifest = {
            **manifest,
            **{key: value for key, value in changed_keys.items() if value is not None},
            "name": name,
        }
        self._extra_files()  # raises before the first step if a link leaves the checkpoint
        self._run_folder, self._keep, self._request = run_folder, keep, request
        self._layout: tuple[Mapping[str, LeafSpec], Plan] | None = None
        self._lock = self._acquire_lock()
        self._remove_leftovers()

    def _open_start(self, start_checkpoint: Path | StartModel) -> Mapping[str, Any]:
        """Return the manifest of the start checkpoint, and keep the location of its small files."""
        self._hf_folder: Path | None = None
        self._start_files: tuple[SmallFile, ...] = ()
        if isinstance(start_checkpoint, StartModel):
            self._start_files = start_checkpoint.small_files
            return start_checkpoint.manifest
        with open_reader(start_checkpoint, verify=False) as reader:  # reads the manifest, but no leaf
            self._hf_folder = reader.folder / HF_FOLDER
            return reader.manifest

    def _extra_files(self) -> tuple[SmallFile, ...]:
        """Return the tokenizer and other files of the model, from the newest step if there is one."""
        if self._hf_folder is None:
            return self._start_files
        return copied_files(small_files(self._hf_folder), self._hf_folder.parent, path_prefix=f"{HF_FOLDER}/")

    def _acquire_lock(self) -> int:
        try:
            self._run_folder.mkdir(parents=True, exist_ok=True)
            fsync_path(self._run_folder.parent)
            return acquire_lock(self._run_folder / LOCK, self._run_folder)
        except OSError as error:
            raise io_error(self._run_folder, error) from error

    def _remove_leftovers(self) -> None:
        try:
            for path in self._run_folder.iterdir():
                if LEFTOVER_NAME.fullmatch(path.name):
                    remove_path(path)
            for step in self.steps():
                remove_work_folder(step_folder(self._run_folder, step))
        except OSError as error:
            self.close()
            raise io_error(self._run_folder, error) from error

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock of the run."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def clear(self) -> None:
        """Remove all steps, the last one first: a kill leaves a run that stopped at an earlier step."""
        for step in reversed(self.steps()):
            self._remove_step(step)

    def steps(self) -> list[int]:
        """Return the steps with complete checkpoints, ascending."""
        return saved_steps(self._run_folder)

    def open(self, step: int) -> ItemReader:
        """Open the checkpoint of a step; PrepError if it is damaged or missing."""
        return open_reader(step_folder(self._run_folder, step))

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
        if reserved := PREP_KEYS & {*manifest_fields}:
            raise ValueError(f"manifest_fields has reserved keys: {', '.join(sorted(reserved))}")
        out = step_folder(self._run_folder, step)
        if os.path.lexists(out):
            raise PrepError(
                f"{out} exists", "a saved step is not overwritten", "remove the folder, or save another step"
            )
        plan = self._plan(step, leaves, manifest_fields)
        try:
            self._write(plan, out, list(leaves.values()))
        except BaseException:
            shutil.rmtree(out.with_name(f"{out.name}.partial"), ignore_errors=True)
            raise
        self._hf_folder = out / STATE_ITEM / HF_FOLDER
        self._remove_old_steps()

    def _write(self, plan: Plan, out: Path, leaves: Sequence[HostLeaf]) -> None:
        with open_staging(out) as stage:
            run_identity = identify_run(replace(plan, small_files=()))  # their paths differ after each save
            stage.open(run_identity, restart=True)
            check_free_space(plan, stage.folder)
            with open_sink(plan, stage) as sink:
                spend = make_budget(MEMORY_NBYTES)
                checksums = checksum_recorder(plan, stage)
                source = HostLeafReader(leaves)
                outcome = pipeline.run(
                    plan.streams, source, sink=sink, budget=spend, progress=NullProgress(), checksums=checksums
                )
            if checksums:
                checksums.save()
            finalize_output(plan, stage, run_identity=run_identity, outcome=outcome)
            stage.publish()

    def _remove_old_steps(self) -> None:
        if isinstance(self._keep, str):
            return
        for step in self.steps()[: -self._keep]:
            self._remove_step(step)

    def _remove_step(self, step: int) -> None:
        folder = step_folder(self._run_folder, step)
        removed_folder = folder.with_name(f"{folder.name}.removed.partial")
        try:
            folder.rename(removed_folder)
            fsync_path(self._run_folder)
            shutil.rmtree(removed_folder)
        except OSError as error:
            raise io_error(folder, error) from error

    def _plan(self, step: int, leaves: Mapping[str, HostLeaf], manifest_fields: Mapping[str, Any]) -> Plan:
        """Return the plan of a save; the part that does not depend on the step is made once."""
        stored = {name: LeafSpec(tuple(leaf.shape), leaf.dtype) for name, leaf in leaves.items()}
        if self._layout is None or self._layout[0] != stored:
            slab_nbytes = make_budget(MEMORY_NBYTES).slab_nbytes
            self._layout = (
                stored,
                plan_training_step(stored, self._start_manifest, request=self._request, slab_nbytes=slab_nbytes),
            )
        plan = self._layout[1]
        small = settings_files(
            plan.settings["config"], (), extra_files=self._extra_files(), path_prefix=f"{HF_FOLDER}/"
        )
        return replace(plan, small_files=small, settings={**plan.settings, **manifest_fields, "step": step})
