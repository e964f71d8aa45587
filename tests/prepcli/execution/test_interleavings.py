"""The protocol of processes that share an output, in every interleaving of their steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from prepcli.engine.pipeline import PipelineResult
from prepcli.errors import FAILED, STOPPED, PrepError
from prepcli.execution.coordination import ConversionTask, WaitOptions, work_together
from prepcli.execution.staging import open_staging, remove_work_folder
from prepcli.planning.plan import Contiguous, Plan, Stream
from prepcli.planning.shares import Share
from tests.helpers.interleaving import ANY, COARSE, FINE, Process, World, explore, simulated, step

STREAMS = 3
PLAN = Plan(
    "save-init", "prep save-init m", "m", (),
    tuple(Stream(f"t{i}", "float32", (4,), (0, 4), (Contiguous(0, 0),), (Contiguous(0, 0),)) for i in range(STREAMS)), (),
)  # fmt: skip
RUN: dict[str, object] = {"request": "prep x", "source": "a", "plan": "b", "prep": "1"}


@dataclass
class Life:
    """A start of a process: whether its work fails, and the attempt that it belongs to."""

    share: Share
    fails: bool = False
    restart: bool = False
    attempt: int = 0
    published: bool = False

    def is_before(self, other: Life) -> bool:
        """Whether this is an earlier start of the same process."""
        return self.attempt < other.attempt and self.share == other.share

    def run(self, out: Path) -> None:
        """What `convert` does, with a share that is a file for each stream."""
        if not (out / "whole").exists():
            with open_staging(out) as stage:
                division = stage.open(RUN, self.restart, self.share)
                if (out / "whole").exists():
                    stage.discard()
                    return
                task = ConversionTask(PLAN, RUN, stage, division, range(self.share.index, self.share.index + 1))
                work_together(task, lambda: self._move(task), lambda done: self._finish(task, done), WaitOptions())
        remove_work_folder(out)

    def _move(self, task: ConversionTask) -> PipelineResult:
        notes, heard = task.stage.failures._stamps_at_join, task.stage.failures._heard_stamps
        state = task.division, sorted(notes), sorted(name for name in notes if notes[name] == heard.get(name))
        step("move", *state)
        if self.fails:
            raise PrepError("t1 is damaged")
        with task.open_journal() as journal:
            for stream in task.own_plan.streams:
                (task.stage.folder / stream.name).write_text(stream.name)
            streams = task.own_plan.streams
            journal.record(sum(s.nbytes for s in streams), {at: f"of {s.name}" for at, s in enumerate(streams)})
        step("moved", *state)
        return PipelineResult()

    def _finish(self, task: ConversionTask, outcome: PipelineResult) -> None:
        assert outcome.digests == {number: f"of t{number}" for number in range(STREAMS)}
        for stream in PLAN.streams:
            assert (task.stage.folder / stream.name).read_text() == stream.name
        assert not task.stage.out.exists(), "published twice"
        (task.stage.folder / "whole").touch()
        task.stage.publish()
        self.published = True


def processes(out: Path, lives: list[Life], *, eager: bool = False) -> list[Process]:
    """A process for each life. Lives of an attempt start when all of the attempt before have ended; with `eager` a life
    starts once the one before it of the same number has ended."""
    found: list[Process] = []

    def may_start(life: Life) -> bool:
        before = [process for process, other in zip(found, lives) if other.attempt < life.attempt]
        own = [process for process, other in zip(found, lives) if other.is_before(life)]
        return all(process.is_done for process in (own if eager else before))

    found += [Process(partial(life.run, out), partial(may_start, life), life.attempt) for life in lives]
    return found


def check_whole(world: World) -> None:
    """The output is published, whole, and nothing else is left."""
    out = world.folder / "out"
    assert sorted(path.name for path in world.folder.iterdir()) == ["out"]
    assert sorted(path.name for path in out.iterdir()) == [*(f"t{n}" for n in range(STREAMS)), "whole"]


def code(process: Process) -> int:
    """How a process ended; any other error than a PrepError is none of those that a process may end by."""
    assert process.ended is None or isinstance(process.ended, PrepError), repr(process.ended)
    return process.ended.code if process.ended else 0


@dataclass(frozen=True)
class Depth:
    """Where processes are interrupted, how many may be killed, and how often one is interrupted that could go on."""

    points: frozenset[str] = COARSE
    kills: int = 0
    switches: int = ANY
    eager: bool = False


def states(tmp_path: Path, lives: Callable[[], list[Life]], check: Callable[[World], None], depth: Depth) -> int:
    """Explore the lives of processes; the number of states."""

    def make(folder: Path) -> World:
        found = processes(folder / "out", lives(), eager=depth.eager)
        return World(folder, found, points=depth.points, kills=depth.kills, switches=depth.switches)

    with simulated():
        return explore(make, check, tmp_path)


def attempt(count: int, number: int = 0, *, fails: int = -1, restart: bool = False) -> list[Life]:
    """A start of each of so many processes, one of which fails."""
    return [Life(Share(count, i), i == fails, restart, number) for i in range(count)]


def check_all_end_well(world: World) -> None:
    assert [code(process) for process in world.processes] == [0] * len(world.processes)
    check_whole(world)


def check_failure_reaches_all(world: World) -> None:
    """Each says what the failure was, none waited for as long as for a process that never starts."""
    for process in world.processes:
        assert code(process) == FAILED
        assert "t1 is damaged" in str(process.ended)
    assert world.ticks < 2
    assert not (world.folder / "out").exists()


def check_last_attempt_ends_well(world: World) -> None:
    """All processes of the last attempt end well, whatever became of those before."""
    last = [p for p in world.processes if p.attempt == max(p.attempt for p in world.processes)]
    assert [code(process) for process in last] == [0] * len(last)
    check_whole(world)


def check_killed(world: World) -> None:
    """One was killed: the others end with 0 if the output is whole, else say who is missing."""
    for process in world.processes:
        if not process.is_killed:
            assert code(process) == (0 if (world.folder / "out").exists() else STOPPED)


def check_failed_one_ends_well(world: World) -> None:
    """The process that failed ends well when it is started again, whether or not the other one waits for it."""
    assert code(world.processes[-1]) == 0
    check_whole(world)


FAILS = [pytest.param(n, restart, id=f"{n}{' restart' * restart}") for n in range(2) for restart in (False, True)]


def test_processes_end_when_all_have(tmp_path: Path):
    assert states(tmp_path, lambda: attempt(2), check_all_end_well, Depth()) > 100


@pytest.mark.parametrize(("fails", "restart"), FAILS)
def test_failure_reaches_every_process(tmp_path: Path, fails: int, restart: bool):
    states(tmp_path, lambda: attempt(2, fails=fails, restart=restart), check_failure_reaches_all, Depth())


def test_killed_process_is_missed_by_the_others(tmp_path: Path):
    states(tmp_path, lambda: attempt(2), check_killed, Depth(kills=1))


@pytest.mark.slow
@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize("restart", [False, True])
def test_failure_does_not_end_the_next_attempt(tmp_path: Path, fails: int, restart: bool):
    def lives() -> list[Life]:
        return [*attempt(2, fails=fails), *attempt(2, 1, restart=restart)]

    states(tmp_path, lives, check_last_attempt_ends_well, Depth())


@pytest.mark.slow
def test_failed_process_comes_back_at_any_moment(tmp_path: Path):
    lives = [*attempt(2, fails=1), Life(Share(2, 1), attempt=1)]
    states(tmp_path, lambda: [replace(life) for life in lives], check_failed_one_ends_well, Depth(eager=True))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_ends_what_a_killed_one_began(tmp_path: Path, count: int):
    states(
        tmp_path, lambda: [*attempt(2), *attempt(count, 1)], check_last_attempt_ends_well, Depth(kills=1, switches=2)
    )


@pytest.mark.slow
@pytest.mark.parametrize("fails", [0, 2])
def test_failure_reaches_every_one_of_three(tmp_path: Path, fails: int):
    states(tmp_path, lambda: attempt(3, fails=fails), check_failure_reaches_all, Depth(switches=3))


@pytest.mark.slow
def test_three_processes_end_when_all_have(tmp_path: Path):
    states(tmp_path, lambda: attempt(3), check_all_end_well, Depth(switches=3))


@pytest.mark.slow
def test_processes_end_interrupted_at_any_operation(tmp_path: Path):
    states(tmp_path, lambda: attempt(2), check_all_end_well, Depth(FINE, switches=1))


@pytest.mark.slow
@pytest.mark.parametrize(("fails", "restart"), FAILS)
def test_failure_reaches_all_at_any_operation(tmp_path: Path, fails: int, restart: bool):
    lives = partial(attempt, 2, fails=fails, restart=restart)
    states(tmp_path, lives, check_failure_reaches_all, Depth(FINE, switches=1))


@pytest.mark.slow
def test_killed_process_is_missed_at_any_operation(tmp_path: Path):
    states(tmp_path, lambda: attempt(2), check_killed, Depth(FINE, kills=1, switches=0))
