"""Plans: the texts that digests are computed from, and the shares of processes."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.algebra.axis_map import bind_row
from prepcli.algebra.grids import ChunkGrid, ChunkTable, run_parts
from prepcli.algebra.rows import parse_row
from prepcli.core.errors import USAGE, PrepError, UsageError
from prepcli.engine.casts import Cast
from prepcli.engine.fills import Fill
from prepcli.planning.arrays import whole_array
from prepcli.planning.chunk_placement import LeafPiece, place_chunks
from prepcli.planning.item_storage import Compression
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import (
    NAMES,
    OWN_TEXTS,
    DroppedTensor,
    EqualityCheck,
    OutputFile,
    OutputLeaf,
    Plan,
    SmallFile,
    SourceFile,
    Stream,
    encode_text,
    iter_text,
)
from prepcli.planning.work_units import (
    SINGLE_PROCESS,
    Share,
    divide_streams,
    parse_share,
    requested_share,
    subplan,
)
from tests.helpers.plans import flat


def dataclasses_in(hint: Any, found: set[type]) -> set[type]:
    """Return the dataclasses in a type, directly or through fields."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and hint not in found:
        found.add(hint)
        for field_hint in typing.get_type_hints(hint).values():
            dataclasses_in(field_hint, found)
    for argument in typing.get_args(hint):
        dataclasses_in(argument, found)
    return found


def test_every_dataclass_in_a_plan_has_a_name():
    assert dataclasses_in(Plan, set()) == {*NAMES, *OWN_TEXTS}


@pytest.mark.parametrize("cls", NAMES, ids=lambda cls: cls.__name__)
def test_renamed_fields_of_plan_text_exist(cls: Any):
    encoded = [field.name for field in dataclasses.fields(cls) if field.repr]
    renames = NAMES[cls][1]
    assert set(renames) <= set(encoded)
    names = [renames.get(name, name) for name in encoded]
    assert len(names) == len(set(names))


def make_plan() -> Plan:
    """Return a plan that contains every class of the encoding."""
    row = "layers vocab <- h.{layers@list}.w: (two=1 vocab)"
    axis_map = bind_row(parse_row(row), {"layers": 2, "list": (3, 5), "vocab": 3, "two": 2})
    grid = ChunkGrid((2, 3), (1, 3))
    pieces = [
        LeafPiece("w", axis_map, tuple(stacked.items()), grid, "float32")
        for _, stacked in axis_map.tensors()
    ]
    layout = place_chunks(pieces)
    first, second = layout.locations
    table = ChunkTable.from_positions((0, 0), (1, 1), {(0, 0): (1, 8)})
    explicit = first.with_array(dataclasses.replace(first.array, chunks=table))
    parts = run_parts((2, 3), 4, [(8, 12), (24, 12)], file=0)
    parted = second.with_array(dataclasses.replace(second.array, chunks=parts))
    view = whole_array("w", "float32", (6,), (0, 8), (4,))
    streams = (
        Stream(
            "h.3.w",
            "float32",
            (6,),
            (0, 6),
            (flat("float32", (6,), 8),),
            (layout.locations[0],),
            (Cast("bfloat16"),),
        ),
        Stream(
            "h.5.w",
            "float32",
            (6,),
            (0, 6),
            (view, explicit),
            (parted,),
            (Fill("normal", 7, 0.5),),
        ),
    )
    return Plan(
        command="save-init",
        request="prep save-init m",
        source_name="m",
        source_files=(SourceFile("model.safetensors", 100, 5, "ab"),),
        streams=streams,
        files=(OutputFile("d0", 64, b"header", ((60, b"end"),)),),
        small_files=(SmallFile("config.json", b"{}", "elsewhere", (2, 3)),),
        leaves=(OutputLeaf(("w",), "float32", grid, tuple(layout.placed_chunks["w"])),),
        dropped=(DroppedTensor("mask", 4, "--drop", (0, 1)),),
        checks=(EqualityCheck("head", "wte"),),
        settings=Manifest(config={"vocab_size": 3}),
        display_names={"wte": "transformer.wte"},
        item="params",
        compression=Compression("zstd", 1),
    )


def test_text_of_a_plan_is_stable():
    assert encode_text(make_plan()).split(", ") == GOLDEN.split(", ")


def test_text_omits_headers_and_copied_paths():
    plan = make_plan()
    files = (dataclasses.replace(plan.files[0], header=b"other"),)
    small_files = (dataclasses.replace(plan.small_files[0], copied_from="other"),)
    assert encode_text(
        dataclasses.replace(plan, files=files, small_files=small_files)
    ) == encode_text(plan)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((), "()"),
        ((1,), "(1,)"),
        ((flat("float32", (2,), 1), "a"), "(Flat(file=0, offset=1), 'a')"),
        ({"a": None}, "{'a': None}"),
    ],
)
def test_encode_text_writes_tuples_and_plain_values(value: object, text: str):
    assert encode_text(value) == text


# The text of `make_plan()`. Outputs record digests of such texts: it must never change.
GOLDEN = (
    "Plan(command='save-init', request='prep save-init m', source_name='m', "
    "sources=(SourceFile(path='model.safetensors', size=100, mtime_ns=5, digest='ab'),), "
    "streams=(Stream(name='h.3.w', dtype='float32', shape=(6,), rows=(0, 6), left=(Flat(file=0, offset=8),), "
    "right=(Region(row=AxisMap(text='layers vocab <- h.{layers@list}.w: (two=1 vocab)', "
    "leaf=((Factor(atom='layers', extent=2, held=None),), (Factor(atom='vocab', extent=3, held=None),)), "
    "name=('h.', Choice(factors=(Factor(atom='layers', extent=2, held=None),), numbers=(3, 5)), '.w'), "
    "source=(TensorDim(extent=6, start=0, factors=(Factor(atom='two', extent=2, held=1), Factor(atom='vocab', "
    "extent=3, held=None))),)), at=(('layers', 0),), grid=Grid(shape=(2, 3), chunk=(1, 3)), "
    "places=Lattice(file=0, offset=0, first=(0, 0), strides=(12, 12)), itemsize=4),), fill=None, "
    "cast='bfloat16'), Stream(name='h.5.w', dtype='float32', shape=(6,), rows=(0, 6), left=(Strided(file=0, "
    "offset=8, steps=(4,)), Region(row=AxisMap(text='layers vocab <- h.{layers@list}.w: (two=1 vocab)', "
    "leaf=((Factor(atom='layers', extent=2, held=None),), (Factor(atom='vocab', extent=3, held=None),)), "
    "name=('h.', Choice(factors=(Factor(atom='layers', extent=2, held=None),), numbers=(3, 5)), '.w'), "
    "source=(TensorDim(extent=6, start=0, factors=(Factor(atom='two', extent=2, held=1), Factor(atom='vocab', "
    "extent=3, held=None))),)), at=(('layers', 0),), grid=Grid(shape=(2, 3), chunk=(1, 3)), "
    "places=Scatter(chunks={(0, 0): (1, 8)}), itemsize=4)), "
    "right=(Region(row=AxisMap(text='layers vocab <- h.{layers@list}.w: (two=1 vocab)', "
    "leaf=((Factor(atom='layers', extent=2, held=None),), (Factor(atom='vocab', extent=3, held=None),)), "
    "name=('h.', Choice(factors=(Factor(atom='layers', extent=2, held=None),), numbers=(3, 5)), '.w'), "
    "source=(TensorDim(extent=6, start=0, factors=(Factor(atom='two', extent=2, held=1), Factor(atom='vocab', "
    "extent=3, held=None))),)), at=(('layers', 1),), grid=Grid(shape=(2, 3), chunk=(1, 3)), "
    "places=Parts((((0, 1), (0, 3)), 0, 8, (12, 4)), (((1, 2), (0, 3)), 0, 24, (12, 4))), itemsize=4),), "
    "fill=Fill(kind='normal', seed=7, std=0.5), cast='')), files=(OutFile(path='d0', size=64, fixed=((60, "
    "b'end'),)),), small_files=(SmallFile(path='config.json', content=b'{}', stamp=(2, 3)),), "
    "leaves=(Leaf(path=('w',), dtype='float32', grid=Grid(shape=(2, 3), chunk=(1, 3)), placed=(Placed(first=(0, "
    "0), stop=(1, 1), places=Lattice(file=0, offset=0, first=(0, 0), strides=(12, 12))), Placed(first=(1, 0), "
    "stop=(2, 1), places=Lattice(file=0, offset=4096, first=(1, 0), strides=(12, 12))))),), "
    "dropped=(Dropped(name='mask', nbytes=4, rule='--drop', rows=(0, 1)),), checks=(Same(name='head', "
    "other='wte'),), settings={'config': {'vocab_size': 3}}, names={'wte': 'transformer.wte'}, item='params', "
    "zstd_level=1)"
)


def test_pieces_of_text_are_the_text_of_the_plan():
    plan = make_plan()
    for part in (plan, dataclasses.replace(plan, streams=plan.streams[:1], leaves=())):
        assert "".join(iter_text(part)) == encode_text(part)


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
