"""Write, submit or run a script or command that trains in several processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from prepcli.console.observer import QUIET, Observer
from prepcli.engine.files import io_error
from prepcli.errors import FAILED, Key, Option, PrepError, text, usage_error
from prepcli.execution.signals import PARENT_VARIABLE, remember_signal
from prepcli.execution.uploads import parse_out_url
from prepcli.launch.gke import gke_manifest
from prepcli.launch.hardware import (
    Training,
    check_training,
    gke_hardware,
    plain_hardware,
    tpu_vm_hardware,
)
from prepcli.launch.job import LaunchJob, as_label, parse_env, values_of
from prepcli.launch.local import GRACE_MARGIN_S, ProcessWatcher, start_processes
from prepcli.launch.options import (
    GkeOptions,
    LocalOptions,
    ScriptOptions,
    SlurmOptions,
    TpuOptions,
)
from prepcli.launch.slurm import slurm_script
from prepcli.launch.tpu import tpu_script
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


def launch_slurm(
    recipe_path: Path, train_words: Sequence[str], **options: Unpack[SlurmOptions]
) -> LaunchedScript:
    """Return the batch script of a training, or submit it with `sbatch`.

    Args:
        recipe_path: The recipe.
        train_words: Further words of `prep train`.
        **options: See `SlurmOptions`.
    """
    recipe = _load_recipe(recipe_path, train_words)
    hardware = plain_hardware(options["nodes"], options["devices_per_node"])
    check_training(_training_needs(recipe, train_words), hardware)
    job = _script_job(recipe_path, train_words, options, options["job_name"] or recipe.name)
    timeout_s = recipe.cluster.heartbeat_timeout
    script = slurm_script(job, options, heartbeat_timeout_s=timeout_s)
    return _write_and_submit("slurm", script, options)


def launch_tpu(
    recipe_path: Path, train_words: Sequence[str], **options: Unpack[TpuOptions]
) -> LaunchedScript:
    """Return the `gcloud` script of a training, or run it.

    Args:
        recipe_path: The recipe.
        train_words: Further words of `prep train`.
        **options: See `TpuOptions`.
    """
    recipe = _load_recipe(recipe_path, train_words)
    training = _training_needs(recipe, train_words)
    # None for a generation that prep does not know. The script can still create it with `--runtime-version`.
    hardware = tpu_vm_hardware(options["accelerator"], training)
    if hardware is not None:
        check_training(training, hardware)
    name = options["job_name"] or as_label(recipe.name)
    # The script contains a copy of the recipe file, even if the recipe is shipped with prep.
    job = _script_job(find_training_recipe(recipe_path), train_words, options, name)
    return _write_and_submit("tpu", tpu_script(job, options), options)


def launch_gke(
    recipe_path: Path, train_words: Sequence[str], **options: Unpack[GkeOptions]
) -> LaunchedScript:
    """Return the JobSet of a training, or create it with `kubectl`.

    Args:
        recipe_path: The recipe.
        train_words: Further words of `prep train`.
        **options: See `GkeOptions`.
    """
    recipe = _load_recipe(recipe_path, train_words)
    training = _training_needs(recipe, train_words)
    check_training(training, gke_hardware(options, training))
    if options["claim"] is None and not training.is_in_bucket:
        why = "without a volume, the checkpoints are lost when a pod ends"
        hint = text("{}, or `-- --out gs://BUCKET/RUN`", Option("claim", "NAME"))
        raise usage_error(text("{} is missing", Option("claim")), why, hint)
    # The manifest contains a copy of the recipe file, even if the recipe is shipped with prep.
    recipe_file = find_training_recipe(recipe_path)
    name = options["job_name"] or as_label(recipe.name)
    manifest = gke_manifest(
        _script_job(recipe_file, train_words, options, name),
        options,
        recipe_text=recipe_file.read_text("utf-8"),
        num_slices=num_slices(training.slices),
    )
    return _write_and_submit("gke", manifest, options)


def launch_local(
    recipe_path: Path,
    train_words: Sequence[str],
    observer: Observer,
    *,
    quiet: bool = False,
    **options: Unpack[LocalOptions],
) -> LocalTraining:
    """Train in several processes on this machine.

    Args:
        recipe_path: The recipe.
        train_words: Further words of `prep train`.
        observer: Receives the lines of all processes.
        quiet: Let the processes show errors only.
        **options: See `LocalOptions`.

    Raises:
        PrepError: A process failed or was stopped. The process that caused the end gives the exit code.
    """
    recipe = _load_recipe(recipe_path, train_words)
    processes = options["processes"]
    devices = options["devices"]
    check_training(_training_needs(recipe, train_words), plain_hardware(processes, devices))
    job = LaunchJob(
        recipe=str(recipe_path),
        name="local",
        train_words=tuple(train_words),
        env=parse_env(options["env"]),
    )
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


def _load_recipe(path: Path, train_words: Sequence[str]) -> Recipe:
    """Return the recipe. Raise UsageError for an invalid one before the job waits in a queue."""
    return load_recipe(find_training_recipe(path), values_of("--set", train_words)).recipe


def _training_needs(recipe: Recipe, train_words: Sequence[str]) -> Training:
    """Return the mesh, processes and devices that a training needs. Raise UsageError for an invalid `--out` URL."""
    outputs = values_of("--out", train_words)
    return Training(
        mesh=parse_mesh(recipe.mesh, Key("mesh")),
        slices=parse_slice_counts(recipe.cluster.dcn_mesh),
        num_processes=recipe.cluster.n_processes,
        local_devices=recipe.cluster.n_local_devices,
        # The last `--out` counts, as in `prep train`.
        is_in_bucket=bool(outputs) and parse_out_url(Path(outputs[-1])) is not None,
    )


def _script_job(
    recipe_path: Path, train_words: Sequence[str], options: ScriptOptions, name: str
) -> LaunchJob:
    """Return the job that a script starts."""
    return LaunchJob(
        recipe=str(recipe_path),
        name=name,
        train_words=tuple(train_words),
        setup=tuple(options["setup"]),
        env=parse_env(options["env"]),
        max_restarts=options["max_restarts"],
    )


def _write_and_submit(target: str, script: str, options: ScriptOptions) -> LaunchedScript:
    """Write the script to a file if `out` is set, and submit it if `submit` is set."""
    command = SUBMIT_COMMANDS[target]
    out = None if options["out"] is None else Path(options["out"])
    if out is not None:
        _write_script(out, script)
    reply = _submit_script(command, script) if options["submit"] else None
    return LaunchedScript(target, script, out, " ".join(command), reply)


def _write_script(path: Path, script: str) -> None:
    try:
        # Paths in the script may have bytes that are not UTF-8, which Python keeps as surrogates.
        write_file(path, os.fsencode(script), overwrite=False)
    except FileExistsError:
        hint = text("{} with another name", Option("out"))
        raise usage_error(f"`{path}` already exists", "a script is not overwritten", hint) from None
    except OSError as error:
        raise io_error(path, error) from error


def _submit_script(command: Sequence[str], script: str) -> str:
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
