"""Tables of evidence, growth and lanes with fake measurements, plain copies, and the meter of real commands."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bench import evidence, floor, meter
from bench.alternatives import conversion_commands, usual_text
from bench.evidence import (
    CASES,
    BenchPaths,
    main,
    make_model,
    plan_figures,
    remove,
    run_checked,
)
from bench.evidence_rows import EvidenceRow, evidence_text
from bench.floor import COPY_METHODS, CopyMethod
from bench.floor import main as copy_main
from bench.growth import growth_svg, growth_text
from bench.lanes import GB, LaneCost, ReleasedTime
from bench.meter import CommandCost, anonymous_nbytes, drop_page_cache, measure, process_tree

MIB = 1 << 20
ROW = EvidenceRow(
    "export",
    "512MiB",
    10 * MIB,
    (7.0, 6.0, 8.0),
    (20.0, 12.0, 10.0),
    2.5,
    16.0,
    300 * MIB,
    30 * MIB,
)


def test_ratios_compare_fastest_and_median_runs() -> None:
    assert (ROW.to_fastest, ROW.to_median) == (6 / 10, 7 / 12)
    assert (
        "7.0 6.0 8.0  20.0 12.0 10.0       0.60      0.58    2.5      16.0       300  ext4"
        in evidence_text([ROW], "ext4")
    )


def test_target_is_the_larger_of_cp_and_floor() -> None:
    by_cp = dataclasses.replace(ROW, floor_seconds=(8.0, 7.0), floor_means="direct/direct x2")
    assert (by_cp.to_floor, by_cp.to_target) == (6 / 7, 6 / 9)  # 0.9 x 10 s
    assert dataclasses.replace(ROW, floor_seconds=(10.0, 11.0)).to_target == pytest.approx(6 / 11)
    assert "ext4  7.0 direct/direct x2     0.86      0.67" in evidence_text([by_cp], "ext4")
    assert ROW.to_target is None


def test_measure_case_runs_plain_copies_in_each_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"prep": 5.0, "bash": 4.0}
    ran: list[str] = []

    def run(words: tuple[str | Path, ...]) -> CommandCost:
        name = Path(words[0]).name
        ran.append("plain" if "bench.floor" in words else name)
        return CommandCost(0, 3.0 if "bench.floor" in words else seconds[name], 0.5, 1, 0, "", "")

    monkeypatch.setattr(evidence, "run_checked", run)
    monkeypatch.setattr(evidence, "drop_page_cache", lambda _: None)
    row = evidence.measure_case(
        "export", "128MiB", BenchPaths(tmp_path / "model", tmp_path), 2, COPY_METHODS[:1]
    )
    assert ran == ["prep", "prep", "bash", "plain", "plain", "bash", "prep"]
    assert (row.floor_seconds, row.floor_means) == ((3.0, 3.0), str(COPY_METHODS[0]))


def test_fastest_copy_methods_returns_the_two_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = [
        COPY_METHODS[3],
        COPY_METHODS[1],
        *(means for means in COPY_METHODS if means not in (COPY_METHODS[3], COPY_METHODS[1])),
    ]
    seconds = {means.command(tmp_path, tmp_path): float(n) for n, means in enumerate(order)}
    monkeypatch.setattr(
        evidence, "_cold_run", lambda words, *_: CommandCost(0, seconds[words], 0.5, 1, 0, "", "")
    )
    assert evidence.fastest_copy_methods(tmp_path, tmp_path) == (COPY_METHODS[3], COPY_METHODS[1])


def test_measure_case_orders_runs_and_subtracts_inspect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    peaks = {"inspect": 30, "save-init": 130, "cp": 5}

    def run(words: tuple[str | Path, ...]) -> CommandCost:
        name = "cp" if words[0] == "bash" else str(words[1])
        ran.append(name)
        return CommandCost(0, 1.0, 0.5, peaks[name], 0, "", "")

    monkeypatch.setattr(evidence, "run_checked", run)
    monkeypatch.setattr(evidence, "drop_page_cache", lambda _: ran.append("cold"))
    row = evidence.measure_case(
        "save-init-1x8x1", "128MiB", BenchPaths(tmp_path / "model", tmp_path), 2
    )
    assert ran == ["inspect", "cold", "save-init", "cold", "cp", "cold", "cp", "cold", "save-init"]
    assert (row.peak_nbytes, row.inspect_nbytes, row.seconds) == (100, 30, (1.0, 1.0))


def test_measure_rounds_share_one_cp_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(words: tuple[str | Path, ...]) -> CommandCost:
        name = "cp" if words[0] == "bash" else f"{words[1]} {words[-2]}"
        ran.append(name)
        return CommandCost(0, float(len(ran)), 0.5, 1, 0, "", "")

    monkeypatch.setattr(evidence, "run_checked", run)
    monkeypatch.setattr(evidence, "drop_page_cache", lambda _: None)
    workloads = [("pad-vocab", "512MiB"), ("pad-vocab", "128MiB")]
    rows = evidence.measure_rounds(workloads, BenchPaths(tmp_path / "model", tmp_path), 2)
    assert ran[1:] == [
        "pad-vocab 512MiB",
        "pad-vocab 128MiB",
        "cp",
        "cp",
        "pad-vocab 128MiB",
        "pad-vocab 512MiB",
    ]
    assert [row.seconds for row in rows] == [(2.0, 7.0), (3.0, 6.0)]
    assert {row.cp_seconds for row in rows} == {(4.0, 5.0)}


def test_measure_cases_deletes_all_but_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = BenchPaths(tmp_path / "model", tmp_path)
    for path in (room.model, room.init, room.out, *room.unfinished):
        path.mkdir()

    def fail(_: object) -> CommandCost:
        raise SystemExit("it failed")

    monkeypatch.setattr(evidence, "run_checked", fail)
    with pytest.raises(SystemExit):
        evidence.measure_cases(room, ["export"], 1)
    assert list(tmp_path.iterdir()) == [room.model]


def test_run_checked_reports_stderr() -> None:
    with pytest.raises(SystemExit, match=r"(?s)ended with 3.*no such thing"):
        run_checked(
            [
                sys.executable,
                "-c",
                "import sys; print('no such thing', file=sys.stderr); sys.exit(3)",
            ]
        )


def test_make_model_checks_disk_space_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = dataclasses.make_dataclass("Usage", ["free"])(15 * 10**9)
    monkeypatch.setattr(evidence.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(SystemExit, match=r"free, this takes 14\.70 GiB"):
        make_model(tmp_path, "gpt-neo-1.3B", None)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_plan_figures_creates_only_a_sparse_model(tmp_path: Path) -> None:
    figures = plan_figures(tmp_path)
    assert figures["chunks"] > 256
    assert figures["peak_nbytes"] > figures["above_inspect_nbytes"]
    (model,) = tmp_path.iterdir()
    assert sum(path.stat().st_blocks * 512 for path in model.iterdir()) < 4 * MIB
    remove(model, model)
    assert not model.exists()


def test_main_rejects_unknown_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--work", str(tmp_path / "work"), "--cases", "export,import"])
    assert f"no case import; there are {', '.join(CASES)}" in " ".join(
        capsys.readouterr().err.split()
    )


def _row(gb: int, seconds: float) -> EvidenceRow:
    return EvidenceRow(
        "save-init",
        "512MiB",
        gb * 10**9,
        (seconds, seconds + 1),
        (2.0 * seconds,),
        1.0,
        4.0,
        250 * MIB,
        MIB,
    )


def test_growth_text_has_a_line_per_size() -> None:
    small, large = growth_text([_row(2, 1.0), _row(20, 12.0)]).splitlines()[-2:]
    assert small.split() == ["2.0", "1.0", "2.0", "0.50", "2.0", "0.50", "0.75", "250"]
    assert large.split() == ["20.0", "12.0", "13.0", "0.60", "24.0", "0.50", "0.52", "250"]


def test_growth_svg_has_two_charts() -> None:
    picture = ElementTree.fromstring(growth_svg([_row(2, 1.0), _row(20, 12.0)]))
    assert [child.tag.rpartition("}")[2] for child in picture] == ["style", "svg", "svg"]
    assert len(picture.findall(".//{*}polyline")) == 4
    assert "--color0: #" in (picture[0].text or ""), "the file defines the colours of its curves"


def test_table_of_usual_commands_has_costs_and_ratios() -> None:
    ours, theirs = (
        CommandCost(0, 5.0, 1, 100 * MIB, 0, "", ""),
        CommandCost(0, 60.0, 9, 3000 * MIB, 0, "", ""),
    )
    last = usual_text({"prep": [ours, ours], "other": [theirs]}).splitlines()[-1]
    assert last.split() == ["other", "60.0", "60.0", "12.0", "3000", "30.0"]


def test_conversion_commands_include_flax_if_installed() -> None:
    assert len(conversion_commands(Path("a"), Path("b"), None)) == 2
    assert conversion_commands(Path("a"), Path("b"), Path("python"))["redco: torch, Flax, Orbax"][
        0
    ] == Path("python")


PAGE = floor.PAGE_NBYTES


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a folder of files with sizes around whole pages."""
    folder = tmp_path / "source"
    (folder / "deep").mkdir(parents=True)
    for name, size in {
        "empty": 0,
        "short": 7,
        "pages": 8 * PAGE,
        "deep/ragged": 9 * PAGE + 5,
    }.items():
        (folder / name).write_bytes(os.urandom(size))
    return folder


@pytest.mark.parametrize("means", COPY_METHODS, ids=str)
def test_copy_equals_source(source: Path, means: CopyMethod, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(floor, "BLOCK_NBYTES", 2 * PAGE)
    out = source.with_name("out")
    copy_main([str(word) for word in means.command(source, out)[3:]])
    names = [path.relative_to(source) for path in source.rglob("*")]
    assert sorted(names) == sorted(path.relative_to(out) for path in out.rglob("*"))
    files = [name for name in names if (source / name).is_file()]
    assert all((source / name).read_bytes() == (out / name).read_bytes() for name in files)


def test_copy_does_not_overwrite(source: Path):
    with pytest.raises(FileExistsError):
        copy_main([str(source), str(source)])


def test_failed_write_ends_the_copy(source: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> int:
        raise OSError("no")

    monkeypatch.setattr(floor, "BLOCK_NBYTES", PAGE)
    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(OSError, match="no"):
        copy_main([str(source), str(source.with_name("out"))])


MIB = 1 << 20
MAP = "import mmap, sys, time; m = mmap.mmap(open(sys.argv[1]).fileno(), 0, prot=1); sum(m[::4096]); time.sleep(0.2)"
HOLD = "import sys, time; data = b'x' * (int(sys.argv[1]) << 20); time.sleep(1)"


def hold(mib: int) -> list[str]:
    """Return a command that holds `mib` MiB of memory for a second."""
    return [sys.executable, "-c", HOLD, str(mib)]


def test_measure_returns_peak_memory() -> None:
    base, cost = measure(hold(0)), measure(hold(64))
    assert 63 * MIB < cost.peak_nbytes - base.peak_nbytes < 72 * MIB
    assert cost.max_rss_nbytes > 64 * MIB


@pytest.mark.parametrize("script", ['"$@"; true', '("$@" &); sleep 1'], ids=["child", "orphan"])
def test_measure_includes_memory_of_child_processes(script: str) -> None:
    assert measure(["bash", "-c", script, "bash", *hold(64)]).peak_nbytes > 64 * MIB


def test_measure_ignores_mapped_files(tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(b"x" * (64 * MIB))
    cost = measure([sys.executable, "-c", MAP, str(big)])
    assert cost.peak_nbytes < 32 * MIB
    assert cost.max_rss_nbytes > 64 * MIB


def test_measure_returns_exit_code_output_and_time() -> None:
    cost = measure(
        ["bash", "-c", "echo out; echo err >&2; for ((i = 0; i < 100000; i++)); do :; done; exit 3"]
    )
    assert (cost.exit_code, cost.stdout, cost.stderr) == (3, "out\n", "err\n")
    assert cost.cpu_s > 0
    assert cost.wall_s > 0
    assert measure(["bash", "-c", "kill -9 $$"]).exit_code == -9


def test_interrupted_measure_kills_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def interrupted(process: int, _: int) -> None:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "wait4", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(["sleep", "600"])
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_process_tree_contains_this_process() -> None:
    assert os.getpid() in process_tree(os.getpid())
    assert anonymous_nbytes(os.getpid()) > MIB
    assert anonymous_nbytes(2**22 + 1) == 0  # more than any process has


def test_drop_page_cache_evicts_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model" / "hf").mkdir(parents=True)
    files = [tmp_path / "model" / "a", tmp_path / "model" / "hf" / "b", tmp_path / "c"]
    for path in files:
        path.write_bytes(b"content")
    evicted: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *_: evicted.append(os.fstat(file).st_ino))
    monkeypatch.setattr(meter, "DROP_CACHES", tmp_path / "drop_caches")
    assert drop_page_cache([tmp_path / "model", tmp_path / "c"]) == "drop_caches"
    assert sorted(evicted) == sorted(path.stat().st_ino for path in files)
    assert (tmp_path / "drop_caches").read_text() == "1"
    monkeypatch.setattr(meter, "DROP_CACHES", tmp_path / "absent" / "drop_caches")
    assert drop_page_cache([tmp_path / "c"]) == "fadvise"


def test_rate_of_more_cores_is_bounded_by_the_lock() -> None:
    """Two of ten seconds hold the lock, so that five cores are busy at most."""
    cost = LaneCost(10 * GB, num_lanes=2, wall_s=5.0, cpu_s=10.0, released_s=8.0)
    assert [cost.modelled_gb_s(cores) for cores in (2, 4, 5, 16)] == [2.0, 4.0, 5.0, 5.0]


def test_time_of_nested_calls_counts_once() -> None:
    def spin() -> None:
        end_s = time.thread_time() + 0.02
        while time.thread_time() < end_s:
            pass

    released = ReleasedTime()
    inner = released.timed(spin)
    start_s = time.thread_time()
    released.timed(inner)()
    assert 0.02 <= released.seconds <= time.thread_time() - start_s
