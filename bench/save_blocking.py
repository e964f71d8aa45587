"""Measure how long saves of a training state block the steps, in prep and in Orbax's AsyncCheckpointer.

    python -m bench.save_blocking --work FOLDER [--rounds 5] [--processes 1,2]

Each job holds one state on 8 CPU devices, takes steps that change it, and saves it with each system in turn, to one
disk. A row has the median of the rounds: the seconds in which the main thread takes no step, the seconds until the
checkpoint is durable or at least visible, the steps taken meanwhile, and the peak of anonymous memory beyond that
before the save, all of the slowest or largest process. At the end a process is killed in the middle of a save.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.evidence import log, remove, run_checked
from bench.models import write_model
from prepcli.core.tables import format_table
from prepcli.engine.budget import MIB, anonymous_nbytes
from prepcli.launch.local import free_port, process_environment

CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "num_hidden_layers": 6,
    "num_attention_heads": 8, "intermediate_size": 1376, "vocab_size": 8192, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
DEVICES = 8
MESH = "1,4,2"
PERIOD_S = 0.01
PREP, PREP_FOREGROUND = "prep", "prep, foreground"
ORBAX, ORBAX_FOREGROUND = "Orbax AsyncCheckpointer", "Orbax Checkpointer"
SYSTEMS = (PREP, ORBAX, PREP_FOREGROUND, ORBAX_FOREGROUND)
# Starts the save of (step, state), and returns a function that waits for its end.
SaveStart = Callable[[int, Any], Callable[[], object]]


@dataclass(frozen=True, slots=True)
class SaveCost:
    """Cost of one save in one process.

    Attributes:
        blocked_s: Seconds in which the main thread could take no step.
        durable_s: Seconds until the save had ended.
        steps: Steps taken meanwhile.
        extra_nbytes: Peak of anonymous memory beyond that before the save.
    """

    blocked_s: float
    durable_s: float
    steps: int
    extra_nbytes: int


def start_systems(out: Path, init: Path, group: Any) -> dict[str, SaveStart]:
    """Return a function per system that starts a save, and returns a function that waits for it."""
    import orbax.checkpoint as ocp

    from prepcli.execution.checkpoint_manager import CheckpointManager
    from prepcli.execution.training_folder import FolderStorage
    from prepcli.planning.manifest_fields import Manifest
    from trainer.training.checkpoint import host_leaves

    folder = CheckpointManager(
        FolderStorage(out / "prep"),
        init,
        name="bench",
        keep=1,
        manifest_changes=Manifest(mesh=MESH),
        group=group,
    )
    checkpointers = {
        ORBAX: ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()),
        ORBAX_FOREGROUND: ocp.Checkpointer(ocp.StandardCheckpointHandler()),
    }

    def save_prep(step: int, state: Any) -> Callable[[], object]:
        return folder.start_save(step, host_leaves(state), {}).wait

    def save_prep_foreground(step: int, state: Any) -> Callable[[], object]:
        folder.save(step, host_leaves(state), {})
        return lambda: None

    def save_orbax(name: str) -> SaveStart:
        def save(step: int, state: Any) -> Callable[[], object]:
            checkpointer = checkpointers[name]
            checkpointer.save(out / "orbax" / str(step), args=ocp.args.StandardSave(state))
            return getattr(checkpointer, "wait_until_finished", lambda: None)

        return save

    return {
        PREP: save_prep,
        PREP_FOREGROUND: save_prep_foreground,
        ORBAX: save_orbax(ORBAX),
        ORBAX_FOREGROUND: save_orbax(ORBAX_FOREGROUND),
    }


def make_state(init: Path) -> tuple[Any, Callable[[Any], Any]]:
    """Return a training state with values in all leaves, and a step that changes them. The state is donated."""
    import jax
    import jax.numpy as jnp

    from bench.restore import make_setup, read_state
    from prepcli.restore.item_reader import open_reader

    with open_reader(init, verify=False) as reader:
        state = read_state(reader, make_setup(reader, MESH))
    params = jax.tree.leaves(state["params"])
    fill = jax.jit(
        lambda state: jax.tree.map(lambda leaf: leaf + leaf.size % 7 if leaf.ndim else leaf, state),
        donate_argnums=0,
    )
    step = jax.jit(
        lambda state: jax.tree.map(
            lambda x: jnp.sin(x) if jnp.issubdtype(x.dtype, jnp.floating) else x + 1, state
        ),
        donate_argnums=0,
    )
    log(f"{sum(leaf.nbytes for leaf in params) * 3 / MIB:,.0f} MiB of state")
    return jax.block_until_ready(fill(state)), step


def measure_save(
    start: SaveStart, number: int, state: Any, step: Callable[[Any], Any]
) -> tuple[SaveCost, Any]:
    """Save once while steps go on, and return the cost and the state."""
    import jax

    before_nbytes, peak, ended = anonymous_nbytes(), [0], threading.Event()

    def sample() -> None:
        while not ended.wait(PERIOD_S):
            peak[0] = max(peak[0], anonymous_nbytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    start_s, num_steps = time.monotonic(), 0
    wait = start(number, state)
    blocked_s = time.monotonic() - start_s
    durable: list[float] = []
    waiter = threading.Thread(target=lambda: (wait(), durable.append(time.monotonic() - start_s)))
    waiter.start()
    for _ in range(5):  # an equal number in all processes, since a step may need all of them
        state = jax.block_until_ready(step(state))
        num_steps += waiter.is_alive()
    waiter.join()
    ended.set()
    sampler.join()
    return SaveCost(blocked_s, durable[0], num_steps, peak[0] - before_nbytes), state


def run_worker(work: Path, rounds: int, systems: Sequence[str]) -> None:
    """Save with each system in turn, and print the costs as JSON."""
    from prepcli.core.process_address import ProcessSettings, process_address
    from trainer.distributed.processes import start_processes

    address = process_address(ProcessSettings(), os.environ)
    group = start_processes(address, start_timeout_s=300, heartbeat_timeout_s=100)
    init, out = work / "init", work / "out"
    state, step = make_state(init)
    starts = start_systems(out, init, group)
    costs: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    for number in range(rounds + 1):  # the first round is a warm-up
        for position, name in enumerate(systems):
            print("saving", name, flush=True)
            cost, state = measure_save(starts[name], number * len(systems) + position, state, step)
            group.barrier("measured")
            if number:
                costs[name].append(asdict(cost))
            if group.index == 0:
                remove(*(path for path in (out / "orbax").glob("[0-9]*") if path.is_dir()))
            group.barrier("removed")
    print(json.dumps(costs), flush=True)


def start_workers(
    work: Path, count: int, rounds: int, systems: Sequence[str]
) -> list[subprocess.Popen[str]]:
    """Start the processes of a job."""
    port = free_port()
    words = [
        "--work",
        str(work),
        "--rounds",
        str(rounds),
        "--worker",
        "--systems",
        ";".join(systems),
    ]
    return [
        subprocess.Popen(
            [sys.executable, "-m", "bench.save_blocking", *words],
            env=process_environment(
                os.environ, index=index, count=count, port=port, devices=DEVICES // count
            )
            | {"TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]


def measure_job(work: Path, count: int, rounds: int) -> list[list[str]]:
    """Run a job, and return a row per system."""
    remove(work / "out")
    outputs = [process.communicate()[0] for process in start_workers(work, count, rounds, SYSTEMS)]
    costs_by_process = [json.loads(output.splitlines()[-1]) for output in outputs]
    return [_row(count, name, [costs[name] for costs in costs_by_process]) for name in SYSTEMS]


def _row(
    count: int, name: str, costs_by_process: Iterable[Sequence[Mapping[str, Any]]]
) -> list[str]:
    """Return the row of a system: per figure the median of the rounds, each of the worst process."""
    rounds = list(zip(*costs_by_process))
    worst = {
        key: statistics.median(max(cost[key] for cost in costs) for costs in rounds)
        for key in ("blocked_s", "durable_s", "steps", "extra_nbytes")
    }
    figures = [f"{worst['blocked_s']:.2f}", f"{worst['durable_s']:.2f}", f"{worst['steps']:.0f}"]
    return [str(count), name, *figures, f"{worst['extra_nbytes'] / MIB:,.0f}"]


def kill_in_save(work: Path, name: str) -> str:
    """Kill a process in the middle of its second save with SIGKILL, and return the names that it leaves."""
    remove(work / "out")
    (process,) = start_workers(work, 1, 100, [name])
    assert process.stdout
    lines = (line for line in process.stdout if line.startswith("saving"))
    next(lines)
    next(lines)
    folder = work / "out" / ("prep" if name == PREP else "orbax")
    while not [path for path in folder.glob("*") if "." in path.name.strip(".")]:
        time.sleep(0.001)
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return f"{name}, killed in a save: {', '.join(sorted(path.name for path in folder.iterdir()))}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table per number of processes."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.save_blocking", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--work", type=Path, required=True, metavar="FOLDER", help="folder on the disk to measure"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="saves of each system (default: 5)"
    )
    parser.add_argument(
        "--processes", default="1,2", metavar="N,…", help="numbers of processes (default: 1,2)"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--systems", default=";".join(SYSTEMS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        run_worker(options.work.absolute(), options.rounds, options.systems.split(";"))
        return
    work: Path = options.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "init").exists():
        write_model(work / "model", CONFIG)
        run_checked(
            [
                sys.executable,
                "-m",
                "prepcli",
                "save-init",
                work / "model",
                "--mesh",
                MESH,
                "--out",
                work / "init",
                "-q",
            ]
        )
    header = ["processes", "system", "blocked s", "durable s", "steps", "extra MiB"]
    for count in options.processes.split(","):
        rows = measure_job(work, int(count), options.rounds)
        print(format_table(rows, header, right_aligned=header[2:]), flush=True)
    for name in (PREP, ORBAX):
        print(kill_in_save(work, name), flush=True)
    shutil.rmtree(work / "out")


if __name__ == "__main__":
    main()
