"""The protocol of processes that share an output, in every interleaving of their steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from prepcli.core.errors import FAILED, STOPPED, PrepError
from prepcli.execution.coordination import Team
from prepcli.execution.staging import Staging, remove_work_folder
from prepcli.planning.plan import Plan, Stream
from prepcli.planning.shares import Share
from tests.helpers.interleaving import ANY, COARSE, FINE, Process, World, explore, simulated, step
from tests.helpers.plans import flat
from tests.helpers.slow_cases import slow_except

STREAMS = 3
LOCATION = (flat("float32", (4,)),)
PLAN = Plan(
    "save-init", "prep save-init m", "m", (),
    tuple(Stream(f"t{i}", "float32", (4,), (0, 4), LOCATION, LOCATION) for i in range(STREAMS)), (),
)  # fmt: skip
RUN: dict[str, object] = {"request": "prep x", "source": "a", "plan": "b", "prep": "1"}


@dataclass
class Life:
    """One start of a process: whether its work fails, and the attempt it belongs to."""

    share: Share
    fails: bool = False
    restart: bool = False
    attempt: int = 0
    published: bool = False

    def is_before(self, later: Life) -> bool:
        """Return whether this is an earlier start of the same process."""
        return self.attempt < later.attempt and self.share == later.share

    def run(self, out: Path) -> None:
        """Run the steps of `ConversionExecutor.run`, with one file per stream as the share."""
        if not (out / "whole").exists():
            with Staging(out) as stage:
                stage.open(RUN, self.restart, share=self.share)
                if (out / "whole").exists():
                    stage.discard()
                    return
                index = self.share.index
                team = Team(PLAN, stage, str(RUN["plan"]), own_indices=range(index, index + 1))
                with stage.failures.recording_errors():
                    self._move(team)
                stage.mark_moved()
                with team.publishing() as is_needed:
                    if is_needed:
                        self._finish(team)
        remove_work_folder(out)

    def _move(self, team: Team) -> None:
        stage = team.stage
        notes, heard = stage.failures._stamps_at_join, stage.failures._heard_stamps
        state = (
            (stage.share.count, dict(stage.durable_digests)),
            sorted(notes),
            sorted(name for name in notes if notes[name] == heard.get(name)),
        )
        step("move", *state)
        if self.fails:
            raise PrepError("t1 is damaged")
        with team.open_journal(self.share.index) as journal:
            streams = team.share_plan(self.share.index).streams
            for stream in streams:
                (stage.folder / stream.name).write_text(stream.name)
            journal.record(
                sum(s.nbytes for s in streams),
                {index: f"of {s.name}" for index, s in enumerate(streams)},
            )
        step("moved", *state)

    def _finish(self, team: Team) -> None:
        assert team.all_digests() == {number: f"of t{number}" for number in range(STREAMS)}
        for stream in PLAN.streams:
            assert (team.stage.folder / stream.name).read_text() == stream.name
        assert not team.stage.out.exists(), "published twice"
        (team.stage.folder / "whole").touch()
        team.stage.publish()
        self.published = True


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
    assert sorted(path.name for path in world.folder.iterdir()) == ["out"]
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


def check_failure_reaches_all(world: World) -> None:
    """Check that each process reports the failure, long before it would report a missing process."""
    for process in world.processes:
        assert exit_code(process) == FAILED
        assert "t1 is damaged" in str(process.ended)
    assert world.ticks < 2
    assert not (world.folder / "out").exists()


def check_last_attempt_ends_well(world: World) -> None:
    """Check that all processes of the last attempt end well."""
    last_processes = [
        p for p in world.processes if p.attempt == max(p.attempt for p in world.processes)
    ]
    assert [exit_code(process) for process in last_processes] == [0] * len(last_processes)
    check_complete(world)


def check_killed(world: World) -> None:
    """Check that the survivors end with 0 if the output is complete, else report the missing process."""
    for process in world.processes:
        if not process.is_killed:
            assert exit_code(process) == (0 if (world.folder / "out").exists() else STOPPED)


def check_failed_one_ends_well(world: World) -> None:
    """Check that the restarted process ends well, whether or not the other process waits for it."""
    assert exit_code(world.processes[-1]) == 0
    check_complete(world)


FAILS = [(fails, restart) for fails in range(2) for restart in (False, True)]


def test_processes_started_together_all_succeed(tmp_path: Path):
    assert check_lives(tmp_path, lambda: attempt(2), check_all_end_well, Depth()) > 100


@pytest.mark.parametrize(("fails", "restart"), slow_except(FAILS, ((0, False), (1, True))))
def test_failure_reaches_every_process(tmp_path: Path, fails: int, restart: bool):
    check_lives(
        tmp_path,
        lambda: attempt(2, fails=fails, restart=restart),
        check_failure_reaches_all,
        Depth(),
    )


@pytest.mark.parametrize("switches", slow_except((1, ANY), (1,)))
def test_killed_process_is_reported_as_missing(tmp_path: Path, switches: int):
    check_lives(tmp_path, lambda: attempt(2), check_killed, Depth(kills=1, switches=switches))


@pytest.mark.slow
@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize("restart", [False, True])
def test_failure_does_not_end_the_next_attempt(tmp_path: Path, fails: int, restart: bool):
    def lives() -> list[Life]:
        return [*attempt(2, fails=fails), *attempt(2, 1, restart=restart)]

    check_lives(tmp_path, lives, check_last_attempt_ends_well, Depth())


@pytest.mark.slow
def test_failed_process_may_return_at_any_moment(tmp_path: Path):
    lives = [*attempt(2, fails=1), Life(Share(2, 1), attempt=1)]
    check_lives(
        tmp_path,
        lambda: [replace(life) for life in lives],
        check_failed_one_ends_well,
        Depth(eager=True),
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_of_processes_completes_a_killed_run(tmp_path: Path, count: int):
    check_lives(
        tmp_path,
        lambda: [*attempt(2), *attempt(count, 1)],
        check_last_attempt_ends_well,
        Depth(kills=1, switches=2),
    )


@pytest.mark.slow
@pytest.mark.parametrize("fails", [0, 2])
def test_failure_reaches_all_three_processes(tmp_path: Path, fails: int):
    check_lives(
        tmp_path, lambda: attempt(3, fails=fails), check_failure_reaches_all, Depth(switches=3)
    )


@pytest.mark.slow
def test_three_processes_started_together_all_succeed(tmp_path: Path):
    check_lives(tmp_path, lambda: attempt(3), check_all_end_well, Depth(switches=3))


@pytest.mark.slow
def test_two_processes_succeed_with_a_switch_at_any_operation(tmp_path: Path):
    check_lives(tmp_path, lambda: attempt(2), check_all_end_well, Depth(FINE, switches=1))


@pytest.mark.slow
@pytest.mark.parametrize(("fails", "restart"), FAILS)
def test_failure_reaches_all_at_any_operation(tmp_path: Path, fails: int, restart: bool):
    lives = partial(attempt, 2, fails=fails, restart=restart)
    check_lives(tmp_path, lives, check_failure_reaches_all, Depth(FINE, switches=1))


@pytest.mark.slow
def test_killed_process_is_reported_at_any_operation(tmp_path: Path):
    check_lives(tmp_path, lambda: attempt(2), check_killed, Depth(FINE, kills=1, switches=0))
