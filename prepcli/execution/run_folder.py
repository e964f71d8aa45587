"""The folder of a training run: a checkpoint for each saved step, `STEP/state/` with `STEP/prep-manifest.json`.

A save is a conversion whose source is memory. It is staged as `STEP.partial` and renamed once it is durable; a step
that is no longer kept is renamed to `STEP.removed.partial` before it is deleted: so a folder called STEP is whole.
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
from prepcli.execution.staging import fsync_path, open_staging, remove_path, remove_work_folder
from prepcli.formats.manifest import MANIFEST_FILE, PREP_KEYS, STATE_ITEM
from prepcli.formats.orbax import METADATA_FILE
from prepcli.planning.plan import Plan, SmallFile
from prepcli.restore.item_reader import ItemReader, open_reader
from prepcli.sources.source import HF_FOLDER, small_files
from prepcli.targets.hf_folder import copied_files, settings_files
from prepcli.targets.training_step import plan_training_step
from trainer.models.checkpoint_store import HostLeaf, LeafSpec

LOCK = ".lock"
MEMORY_NBYTES = 256 << 20  # of a save, besides the leaf that it has fetched
LEFTOVER_NAME = re.compile(r"(0|[1-9][0-9]*)(\.removed)?\.partial")


def step_folder(run: Path, step: int) -> Path:
    """Where a run has the checkpoint of a step."""
    return run / str(step)


def saved_steps(run: Path) -> list[int]:
    """The steps that a run has whole checkpoints of, ascending; none where there is no run."""
    try:
        names = [name for name in os.listdir(run) if re.fullmatch("0|[1-9][0-9]{0,17}", name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise io_error(run, error) from error
    return sorted(int(name) for name in names if _is_step(run / name))


def _is_step(folder: Path) -> bool:
    return (folder / MANIFEST_FILE).is_file() and (folder / STATE_ITEM / METADATA_FILE).is_file()


class RunFolder:
    """A state.Store: the checkpoints of one run, written by one process at a time."""

    def __init__(
        self,
        run_folder: Path,
        start_checkpoint: Path,
        name: str,
        keep: int | Literal["all"] = "all",
        request: str = "prep train",
        mesh: str | None = None,
        rules: Sequence[str] | None = None,
        scan: bool | None = None,
        scan_axis: int | None = None,
    ) -> None:
        """Make the folder, lock it, and clear what killed processes left in it.

        `start` is the checkpoint that the run began from, or goes on from: its settings hold for the run's, but for
        those given here, which say what the tree that is saved is laid out for and how. PrepError where another
        process has the run.
        """
        with open_reader(start_checkpoint, verify=False) as reader:  # no leaf is read
            facts, self._hf_folder = reader.manifest, reader.folder / HF_FOLDER
        given = {"mesh": mesh, "rules": rules, "scan": scan, "scan_axis": scan_axis}
        self._start_manifest = {
            **facts,
            **{key: value for key, value in given.items() if value is not None},
            "name": name,
        }
        self._extra_files()  # a link that leaves the checkpoint is an error before the first step
        self._run_folder, self._keep, self._request = run_folder, keep, request
        self._layout: tuple[Mapping[str, LeafSpec], Plan] | None = None
        self._lock = self._acquire_lock()
        self._remove_leftovers()

    def _extra_files(self) -> tuple[SmallFile, ...]:
        """The tokenizer and what else belongs to the model, as the newest step has it."""
        return copied_files(small_files(self._hf_folder), self._hf_folder.parent, f"{HF_FOLDER}/")

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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the run."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def clear(self) -> None:
        """Remove all steps, the last one first, so that what a kill leaves is a run that was stopped earlier."""
        for step in reversed(self.steps()):
            self._remove_step(step)

    def steps(self) -> list[int]:
        """Steps of which a whole checkpoint is there, ascending."""
        return saved_steps(self._run_folder)

    def open(self, step: int) -> ItemReader:
        """The checkpoint of a step; PrepError if it is broken or not there."""
        return open_reader(step_folder(self._run_folder, step))

    def save(self, step: int, leaves: Mapping[str, HostLeaf], manifest_fields: Mapping[str, Any]) -> None:
        """Store a checkpoint, then remove steps that are no longer kept; what it raises leaves all other steps whole.

        `leaves` are all parameters (`params.…`), the optimizer's state (`opt_state.…`) and what else there is; `facts`
        go into the manifest, beside prep's own keys. PrepError: the step is there, or cannot be written.
        """
        if own := PREP_KEYS & {*manifest_fields}:
            raise ValueError(f"facts may not say {', '.join(sorted(own))}: prep does")
        out = step_folder(self._run_folder, step)
        if os.path.lexists(out):
            raise PrepError(f"{out} exists", "a step is saved once")
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
            run = identify_run(replace(plan, small_files=()))  # which lie elsewhere after each save
            stage.open(run, restart=True)
            check_free_space(plan, stage.folder)
            with open_sink(plan, stage) as sink:
                spend = make_budget(MEMORY_NBYTES)
                checksums = checksum_recorder(plan, stage)
                source = HostLeafReader(leaves)
                outcome = pipeline.run(plan.streams, source, sink, spend, NullProgress(), checksums=checksums)
            if checksums:
                checksums.save()
            finalize_output(plan, stage, run, outcome)
            stage.publish()

    def _remove_old_steps(self) -> None:
        if isinstance(self._keep, str):
            return
        for step in self.steps()[: -self._keep]:
            self._remove_step(step)

    def _remove_step(self, step: int) -> None:
        folder = step_folder(self._run_folder, step)
        away = folder.with_name(f"{folder.name}.removed.partial")
        try:
            folder.rename(away)
            fsync_path(self._run_folder)
            shutil.rmtree(away)
        except OSError as error:
            raise io_error(folder, error) from error

    def _plan(self, step: int, leaves: Mapping[str, HostLeaf], manifest_fields: Mapping[str, Any]) -> Plan:
        """The plan of a save; what does not depend on the step is made once."""
        stored = {name: LeafSpec(tuple(leaf.shape), leaf.dtype) for name, leaf in leaves.items()}
        if self._layout is None or self._layout[0] != stored:
            slab_nbytes = make_budget(MEMORY_NBYTES).slab_nbytes
            self._layout = stored, plan_training_step(stored, self._start_manifest, self._request, slab_nbytes)
        plan = self._layout[1]
        small = settings_files(plan.settings["config"], (), self._extra_files(), f"{HF_FOLDER}/")
        return replace(plan, small_files=small, settings={**plan.settings, **manifest_fields, "step": step})
