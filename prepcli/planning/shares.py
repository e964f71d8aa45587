"""Several processes on one output: which of them has which streams of the plan. Pure."""

from __future__ import annotations

import dataclasses
import heapq
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from prepcli.errors import usage_error
from prepcli.planning.plan import Plan

MAX_PROCESSES = 1 << 16  # processes
LAUNCHERS = (  # of variables that are set only where the very same command runs several times: their count and number
    ("SLURM", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("JAX_NUM_PROCESSES", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
)


@dataclass(frozen=True, slots=True)
class Share:
    """Process `index`, from 0, of `count` that write one output."""

    count: int = 1
    index: int = 0

    def __str__(self) -> str:
        return f"{self.count}/{self.index}"

    def split(self, workers: int) -> tuple[Share, ...]:
        """The shares of so many processes that stand for this one."""
        return tuple(Share(self.count * workers, self.index * workers + at) for at in range(workers))


SINGLE_PROCESS = Share()


def parse_share(text: str) -> Share:
    """`N/I`: process I, from 0, of N. A usage PrepError for anything else."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text.strip(), re.ASCII)
    if match is None:
        raise usage_error(
            f"`--processes {text}` is not understood", "it takes N/I: process I, from 0, of N", "`--processes 4/0`"
        )
    count, index = int(match[1]), int(match[2])
    if not 0 <= index < count <= MAX_PROCESSES:
        hint = f"`--processes {index}/{count}`" if count < index else "`--processes 4/0` to `--processes 4/3`"
        raise usage_error(
            f"`--processes {text}` names no process", f"{count} processes have the numbers from 0 on", hint
        )
    return Share(count, index)


def launcher_share(environ: Mapping[str, str]) -> tuple[Share, str]:
    """The share that a launcher gave this process, and who that was; ALONE where none did.

    SLURM_NTASKS is not asked: the script of a batch job has it too, and that runs once.
    """
    for launcher, count, index in LAUNCHERS:
        found = environ.get(count, ""), environ.get(index, "")
        if (
            all(map(_is_small_decimal, found))
            and int(found[1]) < int(found[0])
            and int(found[0]) in range(2, MAX_PROCESSES + 1)
        ):
            return Share(int(found[0]), int(found[1])), launcher
    return SINGLE_PROCESS, ""


def _is_small_decimal(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 9


def requested_share(text: str | None, environ: Mapping[str, str]) -> tuple[Share, str]:
    """What `--processes` says, else a launcher, which is named then."""
    return launcher_share(environ) if text is None else (parse_share(text), "")


@dataclass(frozen=True, slots=True)
class Division:
    """Among how many processes the streams of a plan are divided, and the digests by number of those that were durable
    before it was made: these are only read back."""

    count: int = 1
    durable_digests: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        """What tells two divisions of a plan apart."""
        return f"{self.count} without {','.join(map(str, sorted(self.durable_digests)))}"


def divide_streams(plan: Plan, division: Division) -> tuple[tuple[int, ...], ...]:
    """The numbers of the streams of each process, ascending: a function of the plan and the division alone.

    Whole tensors, those that are compared or filled from each other together, the largest first to who has least. Those
    that are durable already are divided alike, apart from the others.
    """
    durable: tuple[list[list[int]], list[list[int]]] = [], []  # groups that are not, and those that are
    for group in _stream_groups(plan):
        durable[all(number in division.durable_digests for number in group)].append(group)
    left, kept = (_balance_groups(plan, groups, division.count) for groups in durable)
    return tuple(tuple(sorted([*share, *more])) for share, more in zip(left, kept))


def _balance_groups(plan: Plan, groups: Iterable[list[int]], count: int) -> list[list[int]]:
    sized = sorted(((sum(plan.streams[n].nbytes for n in group), group) for group in groups), key=_largest_first)
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, at) for at in range(count)]
    for nbytes, group in sized:
        load, at = heapq.heappop(loads)
        shares[at] += group
        heapq.heappush(loads, (load + nbytes, at))
    return shares


def _largest_first(group: tuple[int, list[int]]) -> tuple[int, int]:
    return -group[0], group[1][0]


def _stream_groups(plan: Plan) -> list[list[int]]:
    """The numbers of streams that stay together: of one tensor, and of tensors that have to be equal."""
    first: dict[str, str] = {}  # of tensors that have to be equal, one stands for all

    def root(name: str) -> str:
        while first.get(name, name) != name:
            name = first[name]
        return name

    for check in plan.checks:
        first[root(check.name)] = root(check.duplicate_of)
    groups: dict[str, list[int]] = {}
    for number, stream in enumerate(plan.streams):
        groups.setdefault(root(stream.name), []).append(number)
    return list(groups.values())


def subplan(plan: Plan, stream_numbers: Container[int]) -> Plan:
    """A plan of some of a plan's streams, with the checks that they are for; its files and leaves stay."""
    streams = tuple(stream for number, stream in enumerate(plan.streams) if number in stream_numbers)
    names = {stream.name for stream in streams}
    return dataclasses.replace(plan, streams=streams, checks=tuple(c for c in plan.checks if c.name in names))
