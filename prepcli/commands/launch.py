"""`prep launch`: write, submit or run what starts `prep train` in several processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prepcli.console.ui import QUIET, Report, Ui
from prepcli.engine.files import io_error
from prepcli.errors import FAILED, PrepError, usage_error
from prepcli.execution.signals import PARENT_VARIABLE, remember_signal
from prepcli.launch.gke import GkeOptions, gke_manifest
from prepcli.launch.job import MAX_RESTARTS, LaunchJob, as_label, overrides_of, parse_env
from prepcli.launch.local import ProcessWatcher, start_processes
from prepcli.launch.slurm import SlurmOptions, slurm_script
from prepcli.launch.tpu import TpuOptions, tpu_script
from trainer.models.mesh import parse_mesh, resolve_mesh
from trainer.recipe import Recipe, load_recipe

SUBMIT_COMMANDS = {  # commands that read the script from stdin
    "slurm": ("sbatch", "--parsable"),
    "tpu": ("bash", "-s"),
    "gke": ("kubectl", "create", "-f", "-"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """What every target of `prep launch` needs.

    Attributes:
        recipe: The recipe.
        train_words: Further words of `prep train`.
        env: `KEY=VALUE` texts.
        setup: Shell lines that run before the training.
        job_name: Name of the job; None for that of the recipe.
        max_restarts: Restarts of a job that exits with 75.
        out: File for the script; None for stdout.
        submit: Whether to submit the script.
    """

    recipe: Path
    train_words: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    job_name: str | None = None
    max_restarts: int = MAX_RESTARTS
    out: Path | None = None
    submit: bool = False


def launch_slurm(request: LaunchRequest, options: SlurmOptions) -> Report:
    """Return the batch script of a training, or submit it with `sbatch`."""
    recipe = _checked_recipe(request, nodes=options.nodes, devices_per_node=options.devices_per_node)
    return _deliver("slurm", slurm_script(_job(request, request.job_name or recipe.name), options), request)


def launch_tpu(request: LaunchRequest, options: TpuOptions) -> Report:
    """Return the `gcloud` script of a training, or run it."""
    recipe = _checked_recipe(request)
    return _deliver("tpu", tpu_script(_job(request, request.job_name or as_label(recipe.name)), options), request)


def launch_gke(request: LaunchRequest, options: GkeOptions) -> Report:
    """Return the JobSet of a training, or create it with `kubectl`."""
    recipe = _checked_recipe(request, nodes=options.nodes, devices_per_node=options.devices_per_node)
    job = _job(request, request.job_name or as_label(recipe.name))
    return _deliver("gke", gke_manifest(job, options, recipe_text=request.recipe.read_text("utf-8")), request)


def launch_local(request: LaunchRequest, ui: Ui, *, processes: int, devices: int) -> Report:
    """Train in several processes on this machine.

    Args:
        request: The recipe and the environment.
        ui: Receives the lines of all processes.
        processes: Number of processes.
        devices: CPU devices of each process.

    Raises:
        PrepError: A process failed or was stopped; its exit code is that of the first such process.
    """
    _checked_recipe(request, nodes=processes, devices_per_node=devices)
    job = _job(request, "local")
    env = {**dict(job.env), PARENT_VARIABLE: str(os.getpid())}
    words = ["train", *(["--quiet"] if ui.level <= QUIET else []), job.recipe, *job.train_words]
    with remember_signal() as poll_signal:
        running = start_processes(words, count=processes, devices=devices, environ=os.environ, env=env)
        watcher = ProcessWatcher(running, lambda index, line: ui.note(f"[{index}] {line}", QUIET), poll_signal)
        text = watcher.wait()
    return Report(text.rstrip("\n"), {"target": "local", "processes": processes, "devices": devices})


def _checked_recipe(request: LaunchRequest, *, nodes: int | None = None, devices_per_node: int | None = None) -> Recipe:
    """Return the recipe; raise UsageError for an invalid one, or a mesh of another size, before it waits in a queue."""
    recipe = load_recipe(request.recipe, overrides_of(request.train_words)).recipe
    if nodes and devices_per_node:
        resolve_mesh(parse_mesh(recipe.mesh, "mesh"), nodes * devices_per_node, f"{nodes} x {devices_per_node}")
    return recipe


def _job(request: LaunchRequest, name: str) -> LaunchJob:
    return LaunchJob(
        recipe=str(request.recipe),
        name=name,
        train_words=request.train_words,
        setup=request.setup,
        env=parse_env(request.env),
        max_restarts=request.max_restarts,
    )


def _deliver(target: str, text: str, request: LaunchRequest) -> Report:
    """Write the script to `--out`, submit it with `--submit`, or print it."""
    fields = {"target": target, "script": text, "output": request.out and str(request.out)}
    submit_command = " ".join(SUBMIT_COMMANDS[target])
    if request.out is not None:
        _write_new(request.out, text)
    if request.submit:
        return Report(_submit(SUBMIT_COMMANDS[target], text), fields)
    if request.out is not None:
        return Report(str(request.out), fields, f"{submit_command} < {request.out}")
    return Report(text.rstrip("\n"), fields, is_script=True)


def _write_new(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
    except FileExistsError:
        raise usage_error(
            f"`{path}` already exists", "a script is not overwritten", "`--out` with another name"
        ) from None
    except OSError as error:
        raise io_error(path, error) from error


def _submit(command: Sequence[str], text: str) -> str:
    """Run a command with the script as its stdin, and return its stdout."""
    try:
        result = subprocess.run(
            command, input=text, stdout=subprocess.PIPE, encoding="utf-8", errors="surrogateescape", check=False
        )
    except FileNotFoundError:
        why, hint = f"`{command[0]}` is not installed on this machine", "`--out FILE`, and submit it on a login node"
        raise PrepError("the job was not submitted", why, hint) from None
    if result.returncode:
        why = f"`{' '.join(command)}` exited with {result.returncode}"
        raise PrepError("the job was not submitted", why, "its message is above", FAILED)
    return result.stdout.strip()
