"""Write, submit or run a script or command that trains in several processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prepcli.console.observer import QUIET, Observer
from prepcli.engine.files import io_error
from prepcli.errors import FAILED, Key, Option, PrepError, text, usage_error
from prepcli.execution.signals import PARENT_VARIABLE, remember_signal
from prepcli.execution.uploads import parse_out_url
from prepcli.launch.gke import GkeOptions, gke_manifest
from prepcli.launch.hardware import (
    Training,
    check_training,
    gke_hardware,
    plain_hardware,
    tpu_vm_hardware,
)
from prepcli.launch.job import MAX_RESTARTS, LaunchJob, as_label, parse_env, values_of
from prepcli.launch.local import GRACE_MARGIN_S, ProcessWatcher, start_processes
from prepcli.launch.slurm import SlurmOptions, slurm_script
from prepcli.launch.tpu import TpuOptions, tpu_script
from prepcli.operations.recipe_files import find_training_recipe
from trainer.files.writing import write_file
from trainer.models.mesh import parse_mesh
from trainer.models.slices import num_slices, parse_slice_counts
from trainer.recipe import Recipe, load_recipe

SUBMIT_COMMANDS = {  # commands that read the script from stdin
    # `--parsable` prints the job id without a sentence around it.
    "slurm": ("sbatch", "--parsable"),
    "tpu": ("bash", "-s"),
    "gke": ("kubectl", "create", "-f", "-"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """Options of every target of `prep launch`.

    Attributes:
        recipe: The recipe.
        train_words: Further words of `prep train`.
        env: `KEY=VALUE` texts.
        setup: Shell lines that run before the training.
        job_name: Name of the job. The default is the name of the recipe.
        max_restarts: Restarts of a job that exits with 75.
        out: File for the script. None means stdout.
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


@dataclass(frozen=True, slots=True)
class LaunchedScript:
    """The script of a target.

    Attributes:
        target: `slurm`, `tpu` or `gke`.
        script: Text of the script.
        out: File with the script. None if it was not written.
        submit_command: Command that reads the script from stdin.
        reply: Output of the command that submitted the script. None if it was not submitted.
    """

    target: str
    script: str
    out: Path | None
    submit_command: str
    reply: str | None = None


@dataclass(frozen=True, slots=True)
class LocalTraining:
    """A training that ended in several processes of this machine.

    Attributes:
        processes: Number of processes.
        devices: CPU devices of each process.
        result: Text that process 0 printed to stdout.
    """

    processes: int
    devices: int
    result: str


def launch_slurm(request: LaunchRequest, options: SlurmOptions) -> LaunchedScript:
    """Return the batch script of a training, or submit it with `sbatch`."""
    recipe = _load_recipe(request)
    check_training(
        _training(recipe, request), plain_hardware(options.nodes, options.devices_per_node)
    )
    job = _job(request, request.job_name or recipe.name)
    script = slurm_script(job, options, heartbeat_timeout_s=recipe.cluster.heartbeat_timeout)
    return _deliver("slurm", script, request)


def launch_tpu(request: LaunchRequest, options: TpuOptions) -> LaunchedScript:
    """Return the `gcloud` script of a training, or run it."""
    recipe = _load_recipe(request)
    training = _training(recipe, request)
    # None for a generation that prep does not know. The script can still create it with `--runtime-version`.
    hardware = tpu_vm_hardware(options.accelerator, training)
    if hardware is not None:
        check_training(training, hardware)
    job = _job(_with_recipe_file(request), request.job_name or as_label(recipe.name))
    return _deliver("tpu", tpu_script(job, options), request)


def launch_gke(request: LaunchRequest, options: GkeOptions) -> LaunchedScript:
    """Return the JobSet of a training, or create it with `kubectl`."""
    recipe = _load_recipe(request)
    training = _training(recipe, request)
    check_training(training, gke_hardware(options, training))
    if options.claim is None and not training.is_in_bucket:
        why = "without a volume, the checkpoints are lost when a pod ends"
        hint = text("{}, or `-- --out gs://BUCKET/RUN`", Option("claim", "NAME"))
        raise usage_error(text("{} is missing", Option("claim")), why, hint)
    request = _with_recipe_file(request)
    job = _job(request, request.job_name or as_label(recipe.name))
    manifest = gke_manifest(
        job,
        options,
        recipe_text=request.recipe.read_text("utf-8"),
        num_slices=num_slices(training.slices),
    )
    return _deliver("gke", manifest, request)


def launch_local(
    request: LaunchRequest,
    observer: Observer,
    *,
    processes: int,
    devices: int,
    quiet: bool = False,
) -> LocalTraining:
    """Train in several processes on this machine.

    Args:
        request: The recipe and the environment.
        observer: Receives the lines of all processes.
        processes: Number of processes.
        devices: CPU devices of each process.
        quiet: Let the processes show errors only.

    Raises:
        PrepError: A process failed or was stopped. The process that caused the end gives the exit code.
    """
    recipe = _load_recipe(request)
    check_training(_training(recipe, request), plain_hardware(processes, devices))
    job = _job(request, "local")
    # The processes end with this one, also after a SIGKILL: see `die_with_parent`.
    env = {**dict(job.env), PARENT_VARIABLE: str(os.getpid())}
    words = ["train"]
    if quiet:
        words.append("--quiet")
    words += [job.recipe, *job.train_words]
    with remember_signal() as poll_signal:
        running = start_processes(
            words, count=processes, devices=devices, environ=os.environ, env=env
        )
        watcher = ProcessWatcher(
            running,
            lambda index, line: observer.note(f"[{index}] {line}", QUIET),
            poll_signal,
            # After a lost process the others wait in a collective until its heartbeat is missed. A shorter time would
            # kill them before they report the cause.
            grace_s=recipe.cluster.heartbeat_timeout + GRACE_MARGIN_S,
        )
        result = watcher.wait()
    return LocalTraining(processes, devices, result)


def _load_recipe(request: LaunchRequest) -> Recipe:
    """Return the recipe. Raise UsageError for an invalid one before the job waits in a queue."""
    return load_recipe(
        find_training_recipe(request.recipe), values_of("--set", request.train_words)
    ).recipe


def _training(recipe: Recipe, request: LaunchRequest) -> Training:
    """Return the needs of the training. Raise UsageError for an invalid URL of the run."""
    outputs = values_of("--out", request.train_words)
    return Training(
        mesh=parse_mesh(recipe.mesh, Key("mesh")),
        slices=parse_slice_counts(recipe.cluster.dcn_mesh),
        num_processes=recipe.cluster.n_processes,
        local_devices=recipe.cluster.n_local_devices,
        # The last `--out` counts, as in `prep train`.
        is_in_bucket=bool(outputs) and parse_out_url(Path(outputs[-1])) is not None,
    )


def _with_recipe_file(request: LaunchRequest) -> LaunchRequest:
    """Return the request with the file of a shipped recipe, for targets that copy it."""
    return replace(request, recipe=find_training_recipe(request.recipe))


def _job(request: LaunchRequest, name: str) -> LaunchJob:
    return LaunchJob(
        recipe=str(request.recipe),
        name=name,
        train_words=request.train_words,
        setup=request.setup,
        env=parse_env(request.env),
        max_restarts=request.max_restarts,
    )


def _deliver(target: str, script: str, request: LaunchRequest) -> LaunchedScript:
    """Write the script to a file and submit it, each if the request says so."""
    command = SUBMIT_COMMANDS[target]
    if request.out is not None:
        _write_new(request.out, script)
    reply = _submit(command, script) if request.submit else None
    return LaunchedScript(target, script, request.out, " ".join(command), reply)


def _write_new(path: Path, script: str) -> None:
    try:
        # Paths in the script may have bytes that are not UTF-8, which Python keeps as surrogates.
        write_file(path, os.fsencode(script), overwrite=False)
    except FileExistsError:
        hint = text("{} with another name", Option("out"))
        raise usage_error(f"`{path}` already exists", "a script is not overwritten", hint) from None
    except OSError as error:
        raise io_error(path, error) from error


def _submit(command: Sequence[str], script: str) -> str:
    """Run a command with the script as its stdin, and return its stdout."""
    try:
        result = subprocess.run(
            command,
            input=script,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            errors="surrogateescape",
            check=False,
        )
    except FileNotFoundError:
        why = f"`{command[0]}` is not installed on this machine"
        hint = text("{}, and submit it on a login node", Option("out", "FILE"))
        raise PrepError("the job was not submitted", why, hint) from None
    if result.returncode:
        why = f"`{' '.join(command)}` exited with {result.returncode}"
        raise PrepError("the job was not submitted", why, "its message is above", FAILED)
    return result.stdout.strip()
