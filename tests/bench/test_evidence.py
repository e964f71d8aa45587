"""Tests of the evidence table with fake measurements; real ones need an idle machine."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from bench import evidence
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
from bench.floor import COPY_METHODS
from bench.meter import CommandCost

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
