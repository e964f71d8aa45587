"""Shares: every stream has one process, groups stay together, and the shares are balanced."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import USAGE, PrepError, UsageError
from prepcli.engine.fills import Fill
from prepcli.planning.plan import EqualityCheck, Plan, Stream
from prepcli.planning.work_units import (
    SINGLE_PROCESS,
    Share,
    divide_streams,
    parse_share,
    requested_share,
    subplan,
)
from tests.helpers.plans import flat


def stream(name: str, rows: tuple[int, int] = (0, 4), fill: Fill | None = None) -> Stream:
    return Stream(
        name,
        "float32",
        (rows[1], 8),
        rows,
        () if fill else (flat("float32", (rows[1], 8)),),
        (flat("float32", (rows[1], 8)),),
        (fill,) if fill else (),
    )


def plan_of(streams: list[Stream], checks: tuple[EqualityCheck, ...] = ()) -> Plan:
    return Plan("save-init", "prep save-init m", "m", (), tuple(streams), (), checks=checks)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=12))
    streams: list[Stream] = []
    for number, rows in enumerate(sizes):
        streams.append(stream(f"t{number}", (0, rows)))
        if draw(st.booleans()):
            streams.append(stream(f"t{number}", (rows, rows + 2), Fill("mean")))
    names = st.sampled_from([f"t{number}" for number in range(len(sizes))])
    pairs = draw(
        st.lists(st.tuples(names, names).filter(lambda pair: pair[0] != pair[1]), max_size=3)
    )
    return plan_of(streams, tuple(EqualityCheck(*pair) for pair in pairs) if len(sizes) > 1 else ())


def name_groups(plan: Plan) -> list[set[str]]:
    """Return the groups of names that must stay together, by repeated merging."""
    groups = [{s.name} for s in plan.streams]
    for check in plan.checks:
        merged = [names for names in groups if names & {check.name, check.duplicate_of}]
        groups = [names for names in groups if names not in merged] + [set().union(*merged)]
    return groups


@given(plans(), st.integers(1, 6))
def test_divide_streams_keeps_groups_together(plan: Plan, count: int):
    shares = divide_streams(plan, count)
    assert len(shares) == count
    numbers = [number for share in shares for number in share]
    assert len(numbers) == len(set(numbers))
    for group in name_groups(plan):
        members = {number for number, s in enumerate(plan.streams) if s.name in group}
        owners = [process for process, share in enumerate(shares) if members & set(share)]
        assert len(owners) == 1
        assert not owners or members <= set(shares[owners[0]])
    assert all(list(share) == sorted(share) for share in shares)


@given(plans(), st.integers(1, 6))
def test_divide_streams_bounds_the_largest_share(plan: Plan, count: int):
    sizes = [sum(plan.streams[n].nbytes for n in share) for share in divide_streams(plan, count)]
    largest = max(
        sum(s.nbytes for s in plan.streams if s.name in group) for group in name_groups(plan)
    )
    assert max(sizes) <= sum(sizes) / count + largest


def test_divide_streams_balances_large_tensors():
    sizes = [100, 90, 80, 70, 60, 50, 40, 30, 20, 10]
    plan = plan_of([stream(f"t{i}", (0, size)) for i, size in enumerate(sizes)])
    loads = [sum(sizes[n] for n in share) for share in divide_streams(plan, 3)]
    assert max(loads) - min(loads) <= 10


def test_subplan_keeps_checks_of_its_tensors():
    plan = plan_of([stream("a"), stream("b"), stream("c")], (EqualityCheck("a", "b"),))
    assert subplan(plan, {0, 1}).checks == plan.checks
    assert subplan(plan, {2}).checks == ()
    assert [s.name for s in subplan(plan, {0, 2}).streams] == ["a", "c"]


@pytest.mark.parametrize(
    ("text", "share"), [("1/0", SINGLE_PROCESS), ("4/3", Share(4, 3)), (" 64/0 ", Share(64, 0))]
)
def test_parse_share_reads_count_and_index(text: str, share: Share):
    assert parse_share(text) == share
    assert parse_share(str(share)) == share


@pytest.mark.parametrize(
    "text", ["", "4", "4/4", "0/4", "1/4", "0/0", "-1/0", "4/x", "4/1/1", "99999999/1", "٤/١"]
)
def test_parse_share_rejects_invalid_text(text: str):
    with pytest.raises(PrepError) as raised:
        parse_share(text)
    assert raised.value.code == USAGE


def test_parse_share_suggests_swapped_order():
    with pytest.raises(PrepError) as raised:
        parse_share("1/4")
    assert raised.value.hint == "write as process 1 of 4 with `--processes 4/1`"


SLURM = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}
JAX = {"JAX_NUM_PROCESSES": "8", "JAX_PROCESS_ID": "0"}


@pytest.mark.parametrize(
    ("text", "environ", "expected"),
    [
        (None, {}, (SINGLE_PROCESS, "")),
        (None, SLURM, (Share(4, 2), "SLURM")),
        (None, JAX, (Share(8, 0), "JAX_NUM_PROCESSES")),
        (None, {**SLURM, **JAX}, (Share(8, 0), "JAX_NUM_PROCESSES")),
        ("2/1", SLURM, (Share(2, 1), "")),
        ("1/0", SLURM, (SINGLE_PROCESS, "")),
        (
            None,
            {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
            (SINGLE_PROCESS, ""),
        ),  # set in a batch script, which runs once
        (None, {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, (SINGLE_PROCESS, "")),
        ("2/1", {"SLURM_STEP_NUM_TASKS": "4"}, (Share(2, 1), "")),
        (None, {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, (SINGLE_PROCESS, "")),
    ],
)
def test_requested_share_prefers_the_command_line(text, environ, expected):
    assert requested_share(text, environ) == expected


@pytest.mark.parametrize(
    "environ", [{"SLURM_STEP_NUM_TASKS": "4"}, {"JAX_NUM_PROCESSES": "x", "JAX_PROCESS_ID": "0"}]
)
def test_requested_share_refuses_invalid_variables(environ: dict[str, str]):
    with pytest.raises(UsageError, match=next(iter(environ))):
        requested_share(None, environ)


def test_share_split_divides_it_among_workers():
    shares = [share for index in range(3) for share in Share(3, index).split(2)]
    assert shares == [Share(6, index) for index in range(6)]
