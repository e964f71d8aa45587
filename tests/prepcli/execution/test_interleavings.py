"""The protocol of processes that share an output, in every interleaving of their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from prepcli.core.errors import FAILED, PrepError
from prepcli.core.json_values import JsonObject
from prepcli.core.observer import NullProgress
from prepcli.engine.budget import make_budget
from prepcli.engine.digest import StreamDigest
from prepcli.engine.pipeline import PipelineUnit
from prepcli.execution.converter import Converter
from prepcli.execution.folder_output import FolderOutput, remove_work_folder
from prepcli.execution.output import DONE_FOLDER, UnitNote
from prepcli.execution.workers import ExecutionOptions
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import Plan, Stream
from prepcli.planning.work_units import Share, WorkUnit
from tests.helpers.interleaving import ANY, COARSE, FINE, Process, World, explore, simulated, step
from tests.helpers.plans import flat
from tests.helpers.slow_cases import slow_except

STREAMS = 3
LOCATION = (flat("float32", (4,)),)
PLAN = Plan(
    "save-init", "prep save-init m", "m", (),
    tuple(Stream(f"t{i}", "float32", (4,), (0, 4), LOCATION, LOCATION) for i in range(STREAMS)), (),
)  # fmt: skip
UNITS = [WorkUnit((number,), (), 16) for number in range(STREAMS)]
SOURCE = SimpleNamespace(files=(), remote_files=None, manifest=None, all_tensors=())


class FileRun(Converter):
    """A run in a folder with a file for each unit. It reads a file back before it believes an older note."""

    def __init__(self, out: Path, share: Share, *, restart: bool, fails: bool) -> None:
        pool = SimpleNamespace(
            share=share,
            progress=NullProgress(),
            memory_nbytes=1 << 25,
            check=lambda: None,
            worker_pids=list,
        )
        request = SimpleNamespace(
            plan=PLAN, source=SOURCE, pool=pool, say=lambda text: None, plan_digest="b",
            options=ExecutionOptions(memory_nbytes=1 << 25, restart=restart),
        )  # fmt: skip
        self.folder_output = FolderOutput(out)
        super().__init__(cast(Any, request), self.folder_output, UNITS, make_budget(1 << 25))
        self.out = out
        self.fails = fails
        self.has_published = False

    def is_done(self) -> bool:
        """Return whether the output exists."""
        return (self.out / "whole").exists()

    def check_target(self) -> None:
        """Accept any disk."""

    def join(self, identity: Mapping[str, object], source: JsonObject) -> bool:
        """Join the run. Return False if the output was published meanwhile."""
        self.folder_output.join(identity, source, restart=self.request.options.restart)
        self.session = self.folder_output.session
        if self.is_done():
            self.folder_output.discard()
            return False
        return True

    def check_earlier_notes(self) -> None:
        """Compare the files of older notes."""
        for number in [*self.earlier_notes]:
            if not self.claim(number):
                continue
            note = self.read_note(DONE_FOLDER, number)
            self.earlier_notes.pop(number)
            if note is not None and note.session != self.session:
                if (self.folder_output.folder / f"t{number}").read_text() == f"t{number}":
                    self.note_unit(number, replace(note, session=self.session))
                else:
                    self.output.delete([f"{DONE_FOLDER}/{number}"])
            self.release(number)

    def write_units(self, units: Iterator[PipelineUnit]) -> None:
        """Write a file for each unit."""
        for unit in units:
            step("write", unit.number, sorted(self.notes), self.session)
            if self.fails:
                raise PrepError("t1 is damaged")
            (self.folder_output.folder / f"t{unit.number}").write_text(f"t{unit.number}")
            digests = {unit.number: StreamDigest("x", "x")}
            note = UnitNote(digests, session=self.session, writer=self.writer)
            self.note_unit(unit.number, note)
            self.release(unit.number)

    def publish(self) -> None:
        """Check the files, and publish the folder."""
        store = self.folder_output
        store.is_published()
        for stream in PLAN.streams:
            assert (store.folder / stream.name).read_text() == stream.name
        assert not self.out.exists(), "published twice"
        (store.folder / "whole").touch()
        store.publish()
        self.has_published = True

    def read_manifest(self) -> Manifest:
        """Return no manifest."""
        return NO_MANIFEST

    def remove_leftovers(self) -> None:
        """Remove the work folder."""
        remove_work_folder(self.out)


@dataclass
class Life:
    """One start of a process: whether its work fails, and the attempt it belongs to."""

    share: Share
    fails: bool = False
    restart: bool = False
    attempt: int = 0

    def is_before(self, later: Life) -> bool:
        """Return whether this is an earlier start of the same process."""
        return self.attempt < later.attempt and self.share == later.share

    def run(self, out: Path) -> None:
        """Run the steps of `Converter.run` without the checks of the plan."""
        run = FileRun(out, self.share, restart=self.restart, fails=self.fails)
        if not run.is_done():
            try:
                if run.join({**run.identity, "units": "equal"}, {"files": []}):
                    while not run.output.is_published():
                        run.write_all()
                        with run.claim_publication() as may_publish:
                            if may_publish:
                                run.publish()
            finally:
                run.close()
        run.remove_leftovers()


def processes(out: Path, lives: list[Life], *, eager: bool = False) -> list[Process]:
    """Return a process for each life.

    The lives of an attempt start when all lives of the last attempt have ended. With `eager`, a life starts when the
    last life of the same process has ended.
    """
    processes_of_lives: list[Process] = []

    def may_start(life: Life) -> bool:
        earlier_processes = [
            process
            for process, other_life in zip(processes_of_lives, lives)
            if other_life.attempt < life.attempt
        ]
        own_processes = [
            process
            for process, other_life in zip(processes_of_lives, lives)
            if other_life.is_before(life)
        ]
        return all(process.is_done for process in (own_processes if eager else earlier_processes))

    processes_of_lives += [
        Process(partial(life.run, out), partial(may_start, life), life.attempt) for life in lives
    ]
    return processes_of_lives


def check_complete(world: World) -> None:
    """Check that the output is published and complete, and that no other files are left."""
    out = world.folder / "out"
    names = {path.name for path in world.folder.iterdir()}
    if any(process.is_killed for process in world.processes):
        # A process killed while it joins may leave a new folder without work. The next run uses it.
        assert not [*world.folder.glob("*.partial/t*"), *world.folder.glob("*/.prep/done/*")]
        names = {name for name in names if not name.endswith(".partial")}
    assert names == {"out"}
    assert sorted(path.name for path in out.iterdir()) == [
        *(f"t{n}" for n in range(STREAMS)),
        "whole",
    ]


def exit_code(process: Process) -> int:
    """Return the exit code of a process, which may only have ended by a PrepError."""
    assert process.ended is None or isinstance(process.ended, PrepError), repr(process.ended)
    return process.ended.code if process.ended else 0


@dataclass(frozen=True)
class Depth:
    """Limits of an exploration: interruption points, kills, and interruptions of processes that could continue."""

    points: frozenset[str] = COARSE
    kills: int = 0
    switches: int = ANY
    eager: bool = False


def check_lives(
    tmp_path: Path, lives: Callable[[], list[Life]], check: Callable[[World], None], depth: Depth
) -> int:
    """Explore all orders of the lives, and check the world at the end of each. Return the number of states."""

    def make(folder: Path) -> World:
        simulated_processes = processes(folder / "out", lives(), eager=depth.eager)
        return World(
            folder,
            simulated_processes,
            points=depth.points,
            kills=depth.kills,
            switches=depth.switches,
        )

    with simulated():
        return explore(make, check, tmp_path)


def attempt(count: int, number: int = 0, *, fails: int = -1, restart: bool = False) -> list[Life]:
    """Return one start of each process. At most one fails."""
    return [Life(Share(count, i), i == fails, restart, number) for i in range(count)]


def check_all_end_well(world: World) -> None:
    assert [exit_code(process) for process in world.processes] == [0] * len(world.processes)
    check_complete(world)


def check_survivors_end_well(world: World) -> None:
    """Check the ends of all surviving processes, and the output if there is one."""
    survivors = [process for process in world.processes if not process.is_killed]
    assert [exit_code(process) for process in survivors] == [0] * len(survivors)
    if survivors:
        check_complete(world)


def check_one_fails(world: World) -> None:
    """Check the failure of at most one process, and the complete output of the other ones."""
    codes = [exit_code(process) for process in world.processes]
    assert set(codes) <= {0, FAILED}
    assert codes.count(FAILED) <= 1
    check_complete(world)


def check_last_attempt_ends_well(world: World) -> None:
    """Check that all processes of the last attempt end well."""
    last = max(process.attempt for process in world.processes)
    ends = [exit_code(p) for p in world.processes if p.attempt == last and not p.is_killed]
    assert ends == [0] * len(ends)
    if ends:
        check_complete(world)


def test_processes_started_together_all_succeed(tmp_path: Path):
    assert check_lives(tmp_path, lambda: attempt(2), check_all_end_well, Depth()) > 50


@pytest.mark.slow
@pytest.mark.parametrize("restart", slow_except([False, True], [False]))
def test_failed_process_does_not_stop_the_other(tmp_path: Path, restart: bool):
    lives = partial(attempt, 2, fails=0, restart=restart)
    check_lives(tmp_path, lives, check_one_fails, Depth())


@pytest.mark.parametrize("switches", slow_except((1, ANY), (1,)))
def test_work_of_a_killed_process_is_taken_over(tmp_path: Path, switches: int):
    depth = Depth(kills=1, switches=switches)
    check_lives(tmp_path, lambda: attempt(2), check_survivors_end_well, depth)


@pytest.mark.slow
@pytest.mark.parametrize("count", slow_except([1, 2, 3], [1]))
def test_any_number_of_processes_completes_a_killed_run(tmp_path: Path, count: int):
    check_lives(
        tmp_path,
        lambda: [*attempt(2), *attempt(count, 1)],
        check_last_attempt_ends_well,
        Depth(kills=1, switches=1),
    )


@pytest.mark.slow
@pytest.mark.parametrize("restart", [False, True])
def test_failed_process_may_return_at_any_moment(tmp_path: Path, restart: bool):
    lives = [*attempt(2, fails=1), Life(Share(2, 1), attempt=1, restart=restart)]
    check_lives(
        tmp_path,
        lambda: [replace(life) for life in lives],
        check_last_attempt_ends_well,
        Depth(eager=True),
    )


@pytest.mark.slow
def test_three_processes_started_together_all_succeed(tmp_path: Path):
    check_lives(tmp_path, lambda: attempt(3), check_all_end_well, Depth(switches=3))


@pytest.mark.slow
def test_two_processes_succeed_with_a_switch_at_any_operation(tmp_path: Path):
    check_lives(tmp_path, lambda: attempt(2), check_all_end_well, Depth(FINE, switches=1))


@pytest.mark.slow
def test_killed_process_is_replaced_at_any_operation(tmp_path: Path):
    depth = Depth(FINE, kills=1, switches=1)
    check_lives(tmp_path, lambda: attempt(2), check_survivors_end_well, depth)
