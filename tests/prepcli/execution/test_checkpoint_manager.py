"""A run's folder: a saved state is read back unchanged, steps are complete or absent, also after kills."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import PrepError
from prepcli.engine.blobs import HostLeaf
from prepcli.execution.checkpoint_manager import StepExports
from prepcli.formats.manifest import saved_steps
from prepcli.restore.item_reader import open_reader
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import GPT2, GPT_NEO, LLAMA, make_checkpoint
from tests.helpers.training_states import (
    TrainingState,
    host_leaves,
    make_mesh_init,
    make_state,
    open_manager,
    read_leaves,
    read_params,
    same_state,
    save_steps,
)
from tests.helpers.waiting import MAX_S, wait_until


@pytest.fixture(scope="module")
def init(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mesh_init(tmp_path_factory.mktemp("start"), "bfloat16")


@pytest.fixture(scope="module")
def params(init: Path) -> TrainingState:
    return read_params(init)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "runs/tuned"


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_save_and_open_return_the_same_state(init: Path, params: TrainingState, run: Path):
    state = make_state(params, 7)
    with open_manager(run, init) as store:
        assert store.steps() == []
        store.save(7, host_leaves(state), {"recipe": "x = 1", "data": {"identity": "abc"}})
        assert store.steps() == saved_steps(run) == [7]
        with store.open(7) as reader:
            assert same_state(read_leaves(reader), state)
            facts: dict[str, Any] = {**reader.manifest}
    assert {key: facts[key] for key in ("kind", "name", "step", "recipe", "data", "mesh", "scan", "tied")} == {
        "kind": "train", "name": "tuned", "step": 7, "recipe": "x = 1", "data": {"identity": "abc"}, "mesh": "1,2,4",
        "scan": True, "tied": True,
    }  # fmt: skip
    assert facts["config"] == json.loads((init / "hf/config.json").read_text()) | {
        "torch_dtype": "float32"
    }
    assert facts["vocab"] == {"true": 131, "padded": 136}
    assert facts["slots"].keys() == {"opt_state.adam.mu", "opt_state.adam.nu"}
    assert facts["others"].keys() == {"opt_state.adam.count", "step", "skipped"}
    assert {path.name for path in (run / "7/state/hf").iterdir()} == {
        path.name for path in (init / "hf").iterdir()
    }


def test_save_records_the_digests_of_tensors(init: Path, params: TrainingState, run: Path):
    from prepcli.engine.digest import TensorDigest

    state = make_state(params, 1)
    save_steps(run, init, {1: state})
    facts = json.loads((run / "1/prep-manifest.json").read_text())
    name = "transformer.h.2.mlp.c_fc.weight"
    for records, slot in (
        (facts["tensors"], "params"),
        (facts["slots"]["opt_state.adam.nu"], "opt_state.adam.nu"),
    ):
        expected_digest = TensorDigest(state[f"{slot}.layers.mlp.up.weight"][2].tobytes()).text()
        assert records[name] == {
            "dtype": "float32",
            "shape": [256, 64],
            "digests": [[0, 256, expected_digest]],
        }
        tokens = state[f"{slot}.embed.tokens"]
        pieces = [
            [low, high, TensorDigest(tokens[low:high].tobytes()).text()]
            for low, high in ((0, 131), (131, 136))
        ]
        assert records["transformer.wte.weight"]["digests"] == pieces


@pytest.mark.parametrize(
    ("keep", "left"), slow_except([(1, [9]), (2, [4, 9]), ("all", [1, 2, 4, 9])], [(2, [4, 9])])
)
def test_save_keeps_the_newest_steps(
    init: Path, params: TrainingState, run: Path, keep: Any, left: list[int]
):
    """Also when the resumed step is one of the removed steps."""
    save_steps(run, init, {1: make_state(params, 1)}, keep=keep)
    save_steps(
        run, run / "1/state", {step: make_state(params, step) for step in (2, 4, 9)}, keep=keep
    )
    assert saved_steps(run) == left
    assert sorted(path.name for path in run.iterdir()) == [".lock", *map(str, left)]
    assert (run / "9/state/hf/tokenizer_config.json").read_bytes() == (
        init / "hf/tokenizer_config.json"
    ).read_bytes()


def test_save_of_a_resumed_run_writes_the_same_bytes(
    init: Path, params: TrainingState, tmp_path: Path
):
    states = {step: make_state(params, step) for step in (3, 6)}
    save_steps(tmp_path / "a", init, states)
    save_steps(tmp_path / "b", init, {3: states[3]})
    save_steps(tmp_path / "b", tmp_path / "b/3/state", {6: states[6]})
    assert files_of(tmp_path / "a/6") == files_of(tmp_path / "b/6")


BASES = {"gpt2": GPT2, "gpt_neo": GPT_NEO, "llama": LLAMA}
LAYOUTS = [(name, scan, axis) for name in BASES for scan, axis in ((False, 0), (True, 1))]


@pytest.mark.parametrize(("name", "scan", "axis"), slow_except(LAYOUTS, (("llama", True, 1),)))
def test_save_supports_other_tree_layouts(tmp_path: Path, name: str, scan: bool, axis: int):
    make_checkpoint(tmp_path / "m", BASES[name])
    for out, options in (
        ("init", []),
        ("other", ["--scan-axis", str(axis)] if scan else ["--no-scan"]),
    ):
        assert (
            main(["save-init", str(tmp_path / "m"), "--out", str(tmp_path / out), "-q", *options])
            == 0
        )
    state = make_state(read_params(tmp_path / "other"), 1)
    save_steps(
        tmp_path / "run",
        tmp_path / "init",
        {1: state},
        mesh="1,2,1",
        rules=("embed=none",),
        scan=scan,
        scan_axis=axis,
    )
    with open_reader(tmp_path / "run/1") as reader:
        assert same_state(read_leaves(reader), state)
        assert (reader.manifest["mesh"], reader.manifest["rules"]) == ("1,2,1", ["embed=none"])
    assert main(["verify", str(tmp_path / "run"), "-q"]) == 0
    assert main(["verify", str(tmp_path / "run"), str(tmp_path / "m"), "-q"]) == 0


@pytest.mark.slow
def test_save_supports_mixed_dtypes_and_no_optimizer(init: Path, params: TrainingState, run: Path):
    mixed = {
        name: v.astype(np.float16) if ".nu." in name else v
        for name, v in make_state(params, 1).items()
    }
    bare = {name: value for name, value in mixed.items() if not name.startswith("opt_state")}
    with open_manager(run, init) as store:
        for step, state in enumerate([mixed, bare, params]):
            store.save(step, host_leaves(state), {})
            with store.open(step) as reader:
                assert same_state(read_leaves(reader), state)


def test_save_stores_an_incomplete_slot_leaf_by_leaf(init: Path, params: TrainingState, run: Path):
    state = make_state(params, 1)
    del state["opt_state.adam.mu.final_norm.bias"]
    state["opt_state.rows"] = np.arange(6, dtype=np.int32).reshape(2, 3)
    with open_manager(run, init) as store:
        store.save(1, host_leaves(state), {})
        with store.open(1) as reader:
            assert same_state(read_leaves(reader), state)
            slots = reader.manifest["slots"]
            assert [*slots] == ["opt_state.adam.nu", "opt_state.adam.mu"]
            assert "/embed.tokens" in slots["opt_state.adam.mu"]
            assert "/final_norm.bias" not in slots["opt_state.adam.mu"]


def test_save_rejects_an_existing_step(init: Path, params: TrainingState, run: Path):
    with open_manager(run, init) as store:
        store.save(5, host_leaves(params), {})
        before = files_of(run)
        with pytest.raises(PrepError, match="5 exists"):
            store.save(5, host_leaves(params), {})
    assert files_of(run) == before


def test_save_rejects_reserved_manifest_keys(init: Path, params: TrainingState, run: Path):
    with (
        open_manager(run, init) as store,
        pytest.raises(ValueError, match="reserved keys: kind, tensors"),
    ):
        store.save(1, host_leaves(params), {"kind": "x", "tensors": {}, "recipe": ""})


def test_save_rejects_a_state_of_another_model(init: Path, params: TrainingState, run: Path):
    lacking = {name: value for name, value in params.items() if name != "params.final_norm.bias"}
    with open_manager(run, init) as store:
        with pytest.raises(
            PrepError, match=r"the training state lacks the leaf params\.final_norm\.bias"
        ):
            store.save(1, host_leaves(lacking), {})
        with pytest.raises(PrepError, match=r"params\.final_norm\.bias has the wrong shape"):
            store.save(
                1, host_leaves(lacking | {"params.final_norm.bias": np.zeros(63, np.float32)}), {}
            )
    assert [path.name for path in run.iterdir()] == [".lock"]


def no_fetch() -> np.ndarray:
    raise RuntimeError("the device is lost")


def test_failed_save_leaves_other_steps_unchanged(init: Path, params: TrainingState, run: Path):
    save_steps(run, init, {1: make_state(params, 1)})
    before = files_of(run / "1")
    broken = host_leaves(params) | {
        "params.final_norm.bias": HostLeaf.whole((64,), "float32", fetch=no_fetch)
    }
    with open_manager(run, init, keep=1) as store:
        with pytest.raises(RuntimeError, match="the device is lost"):
            store.save(2, broken, {})
        assert files_of(run / "1") == before
        assert sorted(path.name for path in run.iterdir()) == [".lock", "1"]
        store.save(2, host_leaves(params), {})
        assert store.steps() == [2]


def test_save_checks_free_space_first(init: Path, params: TrainingState, run: Path, monkeypatch):
    usage = os.statvfs(init)
    monkeypatch.setattr(
        "shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000, "total": usage.f_blocks})
    )
    with (
        open_manager(run, init) as store,
        pytest.raises(PrepError, match="not enough room for 2"),
    ):
        store.save(2, host_leaves(params), {})


def test_open_removes_leftovers_of_killed_processes(init: Path, params: TrainingState, run: Path):
    save_steps(run, init, {1: params})
    for name in (
        "2.partial/state/d",
        "1000.removed.partial/state",
        "2.partial.keep",
        "notes.partial",
        "1/.prep",
    ):
        (run / name).mkdir(parents=True)
    (run / "recipe.toml").touch()
    assert saved_steps(run) == [1]
    with open_manager(run, init) as store:
        assert store.steps() == [1]
    assert {p.name for p in run.iterdir()} == {
        ".lock",
        "1",
        "2.partial.keep",
        "notes.partial",
        "recipe.toml",
    }
    assert not (run / "1/.prep").exists()


def test_saved_steps_are_complete_steps(init: Path, params: TrainingState, run: Path):
    save_steps(run, init, {10: params, 9: params})
    for name in ("11/state", "007", "12.partial/state", "step"):
        (run / name).mkdir(parents=True)
    (run / "13").touch()
    assert saved_steps(run) == [9, 10]
    assert saved_steps(run / "nothing") == saved_steps(run / "13") == []
    with (
        open_manager(run, init) as store,
        pytest.raises(PrepError, match="holds no Orbax checkpoint"),
    ):
        store.open(11)


def test_run_is_locked_by_one_process(init: Path, run: Path):
    with (
        open_manager(run, init),
        pytest.raises(PrepError, match="tuned is locked"),
        open_manager(run, init),
    ):
        pass
    with open_manager(run, init):
        pass


def test_error_names_an_unwritable_path(init: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(PrepError, match="cannot read or write"),
        open_manager(tmp_path / "file/run", init),
    ):
        pass
    with (
        pytest.raises(PrepError, match="holds no Orbax checkpoint"),
        open_manager(tmp_path / "run", tmp_path / "nothing"),
    ):
        pass
    assert not (tmp_path / "run").exists()


def test_save_names_a_step_it_cannot_remove(
    init: Path, params: TrainingState, run: Path, monkeypatch
):
    save_steps(run, init, {1: params})

    def rename(path: Path, target: Path) -> None:
        if "removed" in target.name:
            raise OSError(errno.EACCES, "Permission denied")
        os.rename(path, target)

    with open_manager(run, init, keep=1) as store:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", rename)
            with pytest.raises(PrepError, match="Permission denied"):
                store.save(2, host_leaves(params), {})
        assert store.steps() == [1, 2]


def test_clear_removes_all_steps(init: Path, params: TrainingState, run: Path):
    save_steps(run, init, {1: params, 2: params})
    with open_manager(run, init) as store:
        store.remove_all_steps()
        assert store.steps() == []
    assert [path.name for path in run.iterdir()] == [".lock"]


def test_due_steps_are_exported_in_order():
    exported, warnings = list[int](), list[str]()
    exports = StepExports(2, export=exported.append, warn=warnings.append)
    for step in (1, 2, 3, 4):
        exports.start(step)
    exports.wait()
    assert (exported, warnings) == ([2, 4], [])
    exports.start(6)
    exports.wait()
    assert exported == [2, 4, 6]


def _wait(event: threading.Event) -> None:
    event.wait()


def test_steps_are_in_use_until_their_export_ends():
    may_end, notes = threading.Event(), list[str]()

    def note(text: str) -> None:
        notes.append(text)
        may_end.set()

    exports = StepExports(1, export=lambda step: _wait(may_end), warn=print, say=note)
    exports.start_missing([1, 2])
    assert set(exports.in_use()) == {1, 2}
    exports.wait()
    assert not exports.in_use()
    assert notes == ["exporting steps 1, 2"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (PrepError("out exists", "it is something else"), "out exists - it is something else"),
        (OSError(errno.EIO, "Input/output error", "out"), "cannot use out - Input/output error"),
    ],
)
def test_failed_export_warns_and_the_next_one_runs(error: Exception, text: str):
    exported, warnings = list[int](), list[str]()

    def export(step: int) -> None:
        if step == 1:
            raise error
        exported.append(step)

    exports = StepExports(1, export=export, warn=warnings.append)
    exports.start_missing([1, 2])
    exports.wait()
    assert exported == [2]
    assert warnings == [f"step 1 was not exported: {text}"]
    assert not exports.in_use()


def test_abandoned_exports_are_not_waited_for():
    may_end, has_begun = threading.Event(), threading.Event()
    exported = list[int]()

    def export(step: int) -> None:
        has_begun.set()
        may_end.wait()
        exported.append(step)

    others = {*threading.enumerate()}
    exports = StepExports(1, export=export, warn=print)
    exports.start_missing([1, 2])
    has_begun.wait()
    (thread,) = {*threading.enumerate()} - others
    exports.abandon()
    exports.wait()
    assert exported == []
    may_end.set()
    thread.join()
    assert exported == [1]


def test_the_thread_ends_when_exports_are_abandoned_without_work():
    others, has_ended = {*threading.enumerate()}, threading.Event()
    exports = StepExports(1, export=lambda step: has_ended.set(), warn=print)
    exports.start(1)
    has_ended.wait()
    (thread,) = {*threading.enumerate()} - others
    exports.abandon()
    thread.join(timeout=MAX_S)
    assert not thread.is_alive()


KEEP = 2


def save_until_killed(run: Path, start: Path) -> None:
    """Save step after step, from the one after the last saved step, until killed."""
    params = read_params(start)
    with open_manager(run, start, keep=KEEP) as store:
        print("begins", flush=True)
        for step in itertools.count(max(store.steps(), default=0) + 1):
            store.save(step, host_leaves(make_state(params, step)), {"recipe": "r"})


def kill_soon(run: Path, start: Path, delay_s: float, *, min_step: int) -> None:
    """Kill a process that saves steps, `delay_s` after it begins, or later when `min_step` is saved."""
    words = [
        sys.executable,
        "-m",
        "tests.prepcli.execution.test_checkpoint_manager",
        str(run),
        str(start),
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as process:
        assert process.stdout
        assert process.stdout.readline() == b"begins\n"
        time.sleep(delay_s)
        wait_until(lambda: max(saved_steps(run), default=0) >= min_step)
        process.kill()
    assert process.returncode == -signal.SIGKILL


def check_killed(folder: Path, kills: int, seed: int) -> None:
    make_checkpoint(
        folder / "m", GPT_NEO, hidden_size=256, num_layers=4, attention_types=[[["global"], 4]]
    )
    assert (
        main(
            ["save-init", str(folder / "m"), "--out", str(folder / "init"), "-q", "--mesh", "1,2,1"]
        )
        == 0
    )
    run, start, rng = folder / "run", folder / "init", random.Random(seed)
    params, last_step, started_s = read_params(start), 1, time.monotonic()
    with open_manager(run, start, keep=KEEP) as store:
        store.save(1, host_leaves(make_state(params, 1)), {"recipe": "r"})
    took_s = time.monotonic() - started_s
    for kill in range(kills):
        # The first kill comes after a new step; the others at any moment.
        kill_soon(run, start, rng.uniform(0.0, 3 * took_s), min_step=2 if kill == 0 else 0)
        steps = saved_steps(run)
        assert max(steps, default=0) >= last_step
        last_step = max(steps, default=0)
        assert len(steps) <= KEEP + 1
        for step in steps:
            with open_reader(run / str(step)) as reader:
                assert same_state(read_leaves(reader), make_state(params, step))
    assert last_step > 1
    with open_manager(run, run / str(last_step), keep=KEEP) as store:
        assert not [path for path in run.iterdir() if path.name.endswith(".partial")]
        store.save(last_step + 1, host_leaves(make_state(params, last_step + 1)), {})
        assert store.steps()[-1] == last_step + 1
        assert len(store.steps()) <= KEEP


def test_manager_survives_kills_at_random_moments(tmp_path: Path):
    check_killed(tmp_path, kills=1, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_manager_survives_many_kills(tmp_path: Path, seed: int):
    check_killed(tmp_path, kills=10, seed=100 + seed)


if __name__ == "__main__":
    save_until_killed(*map(Path, sys.argv[1:]))
