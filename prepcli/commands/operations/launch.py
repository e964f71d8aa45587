"""Write, submit or run a script or a command with several processes."""

from __future__ import annotations

import base64
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from prepcli.commands.operations.recipes import find_training_recipe
from prepcli.core.errors import (
    FAILED,
    INTERRUPTED,
    Command,
    Key,
    Option,
    PrepError,
    Text,
    join_texts,
    text,
    usage_error,
)
from prepcli.core.observer import QUIET, Observer
from prepcli.execution.output_paths import check_local_path, parse_out_url
from prepcli.execution.signals import PARENT_VARIABLE, remember_signal
from prepcli.launch.command import TRAIN, LaunchedCommand, check_process_count
from prepcli.launch.gke import gke_manifest
from prepcli.launch.hardware import (
    Hardware,
    Training,
    check_training,
    gke_hardware,
    plain_hardware,
    tpu_vm_hardware,
)
from prepcli.launch.job import MAX_RESTARTS, LaunchJob, as_label, parse_env
from prepcli.launch.local import GRACE_MARGIN_S, ProcessWatcher, start_processes
from prepcli.launch.options import (
    GkeOptions,
    LocalOptions,
    RayOptions,
    ScriptOptions,
    SkyOptions,
    SlurmOptions,
    SubmitOptions,
    TpuOptions,
)
from prepcli.launch.ray import ray_driver
from prepcli.launch.sky import sky_task
from prepcli.launch.sky_machines import sky_hardware
from prepcli.launch.slurm import slurm_script
from prepcli.launch.tpu import tpu_script
from prepcli.models.mesh import MESH_OPTION, parse_mesh
from prepcli.models.slices import ONE_SLICE, num_slices, parse_slice_counts
from prepcli.stores.files import io_error, write_file
from trainer.recipe import Recipe, load_recipe

# Commands that read the script from stdin.
STDIN_COMMANDS = {
    # `--parsable` prints the job id without a sentence around it.
    "slurm": ("sbatch", "--parsable"),
    "tpu": ("bash", "-s"),
    "gke": ("kubectl", "create", "-f", "-"),
}
# `sky` reads its file several times, so it cannot be a pipe. `--async` ends it when the job is accepted.
SKY_COMMAND = ("sky", "jobs", "launch", "--yes", "--async")
NOT_SUBMITTED = "the job was not submitted"
# The driver is a word of its own command, so that no file has to reach the cluster.
RAY_COMMAND = ("ray", "job", "submit", "--no-wait", "--log-color", "false", "--", "python", "-c")


def submit_line(target: str, path: Path) -> str:
    """Return the shell command to submit the script in a file.

    >>> submit_line("slurm", Path("job.sh"))
    'sbatch --parsable < job.sh'
    >>> submit_line("sky", Path("job.yaml"))
    'sky jobs launch --yes --async job.yaml'
    """
    file = shlex.quote(str(path))
    if target == "sky":
        return f"{shlex.join(SKY_COMMAND)} {file}"
    if target == "ray":
        program = _ray_program(f"$(base64 < {file} | tr -d '\\n')")
        return f'{shlex.join(RAY_COMMAND)} "{program}"'
    return f"{shlex.join(STDIN_COMMANDS[target])} < {file}"


def submit_script(target: str, script: str) -> str:
    """Submit a script and return the reply of the engine.

    Raises:
        PrepError: The program of the engine is not installed, or it failed.
    """
    if target == "sky":
        with tempfile.TemporaryDirectory(prefix="prep-") as folder:
            path = Path(folder) / "job.yaml"
            path.write_bytes(os.fsencode(script))
            return _run([*SKY_COMMAND, str(path)])
    if target == "ray":
        program = _ray_program(base64.b64encode(os.fsencode(script)).decode())
        return _run([*RAY_COMMAND, program], name=shlex.join(RAY_COMMAND))
    # The script of a TPU waits for the command.
    failure = "the job failed" if target == "tpu" else NOT_SUBMITTED
    return _run(STDIN_COMMANDS[target], stdin=script, failure=failure)


def _ray_program(encoded: str) -> str:
    """Return the Python program to run a driver in base64.

    Ray passes the words of a job through a shell. Ray 2.50 quotes them with the rules of Windows, and the shell would
    expand `$` and backticks in the driver. The program has no such characters. Ray quotes it because it has spaces.
    """
    return f"import base64; exec(base64.b64decode('{encoded}'))"


def _run(
    command: Sequence[str], *, stdin: str = "", name: str = "", failure: str = NOT_SUBMITTED
) -> str:
    """Run a command and return its stdout."""
    try:
        result = subprocess.run(
            command,
            input=stdin,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            errors="surrogateescape",
            check=False,
        )
    except FileNotFoundError:
        why = f"`{command[0]}` is not installed on this machine"
        hint = text("{}, and submit it on a login node", Option("out", "FILE"))
        raise PrepError(NOT_SUBMITTED, why, hint) from None
    except OSError as error:
        # E.g. a driver of more than 128 KiB, the limit of Linux for one word.
        why = f"`{name or command[0]}`: {error.strerror}"
        raise PrepError(NOT_SUBMITTED, why, text("{}", Option("out", "FILE"))) from None
    if result.returncode:
        why = f"`{name or shlex.join(command)}` exited with {result.returncode}"
        raise PrepError(failure, why, "its message is above", FAILED)
    return result.stdout.strip()


# Seconds until the processes of a recipe without `cluster.heartbeat_timeout` notice a lost one.
HEARTBEAT_TIMEOUT_S = 60.0
# Mesh of a command without `--mesh`: any number of devices.
ANY_MESH = "-1,1,1"


@dataclass(frozen=True, slots=True)
class LaunchedScript:
    """The script of an engine.

    Attributes:
        target: Name of the engine, e.g. `slurm`.
        script: Text of the script.
        out: File with the script. None if it was not written.
        reply: Output of the submission. None if the script was not submitted.
    """

    target: str
    script: str
    out: Path | None
    reply: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A command with a valid recipe and valid options.

    Attributes:
        command: The command.
        recipe: Its recipe. None if it has none.
        training: Required mesh, processes and devices. None if the command computes on no mesh.
    """

    command: LaunchedCommand
    recipe: Recipe | None
    training: Training | None

    @property
    def name(self) -> str:
        """Name of the recipe, or of the command."""
        return self.command.name if self.recipe is None else self.recipe.name

    @property
    def heartbeat_timeout_s(self) -> float:
        """Seconds until the processes notice a lost one."""
        if self.recipe is None:
            return HEARTBEAT_TIMEOUT_S
        return self.recipe.cluster.heartbeat_timeout


@dataclass(frozen=True, slots=True)
class LocalJob:
    """An ended command in several processes of this machine.

    Attributes:
        processes: Number of processes.
        devices: CPU devices of each process.
        result: Stdout of process 0.
    """

    processes: int
    devices: int
    result: str


def launch_slurm(command: LaunchedCommand, **options: Unpack[SlurmOptions]) -> LaunchedScript:
    """Return the batch script of a command, or submit it with `sbatch`."""
    request = _load_request(command)
    hardware = plain_hardware(options["nodes"], options["devices_per_node"])
    _check_hardware(request, hardware, text("{}", Option("nodes", 1)))
    name = options["job_name"] or request.name
    job = _script_job(command, options, name, options["max_restarts"])
    script = slurm_script(job, options, heartbeat_timeout_s=request.heartbeat_timeout_s)
    return _write_and_submit("slurm", script, options)


def launch_tpu(command: LaunchedCommand, **options: Unpack[TpuOptions]) -> LaunchedScript:
    """Return the `gcloud` script of a command, or run it."""
    request = _load_request(command)
    if request.training is not None:
        # None for a generation that prep does not know. The script can still create it with `--runtime-version`.
        hardware = tpu_vm_hardware(options["accelerator"], request.training.num_devices)
        if hardware is not None:
            check_training(request.training, hardware)
    name = options["job_name"] or as_label(request.name)
    job = _script_job(_with_recipe_file(command), options, name, options["max_restarts"])
    return _write_and_submit("tpu", tpu_script(job, options), options)


def launch_gke(command: LaunchedCommand, **options: Unpack[GkeOptions]) -> LaunchedScript:
    """Return the JobSet of a command, or create it with `kubectl`."""
    request = _load_request(command)
    hardware = plain_hardware(options["nodes"], None)
    slices = 1
    if request.training is not None:
        hardware = gke_hardware(options, request.training)
        slices = num_slices(request.training.slices)
    _check_hardware(request, hardware, text("{}", Option("nodes", 1)))
    if options["claim"] is None:
        _check_output_is_kept(command, "a pod ends", Option("claim", "NAME"))
    name = options["job_name"] or as_label(request.name)
    job = _script_job(_with_recipe_file(command), options, name, options["max_restarts"])
    recipe_text = _recipe_text(command)
    manifest = gke_manifest(job, options, recipe_text=recipe_text, num_slices=slices)
    return _write_and_submit("gke", manifest, options)


def launch_sky(command: LaunchedCommand, **options: Unpack[SkyOptions]) -> LaunchedScript:
    """Return the managed job of SkyPilot for a command, or submit it."""
    request = _load_request(command)
    hardware = sky_hardware(options, command, request.training)
    hint = text("{}", Option("nodes", 1))
    if options["nodes"] == 1:
        # The nodes are the hosts of a TPU slice.
        hint = text("remove {}", Option("accelerator"))
    _check_hardware(request, hardware, hint)
    _check_output_is_kept(command, "a machine is preempted")
    name = options["job_name"] or as_label(request.name)
    job = _script_job(command, options, name)
    task = sky_task(job, options, recipe_text=_recipe_text(command))
    return _write_and_submit("sky", task, options)


def launch_ray(command: LaunchedCommand, **options: Unpack[RayOptions]) -> LaunchedScript:
    """Return the driver of a Ray job for a command, or submit it."""
    request = _load_request(command)
    hardware = plain_hardware(options["workers"], options["tpus"] or options["gpus"])
    _check_hardware(request, hardware, text("{}", Option("workers", 1)))
    if options["folder"] is None:
        _check_output_is_kept(command, "the job ends", Option("folder", "FOLDER"))
    elif not os.path.isabs(options["folder"]):
        what = text("{} is a relative path", Option("folder", options["folder"]))
        hint = text("{}", Option("folder", os.path.abspath(options["folder"])))
        raise usage_error(what, "each worker starts in a folder of its own", hint)
    name = options["job_name"] or as_label(request.name)
    job = LaunchJob(
        command=_with_recipe_file(command),
        name=name,
        env=parse_env(options["env"]),
        max_restarts=options["max_restarts"],
    )
    driver = ray_driver(job, options, recipe_text=_recipe_text(command))
    return _write_and_submit("ray", driver, options)


def launch_local(
    command: LaunchedCommand,
    observer: Observer,
    *,
    quiet: bool = False,
    **options: Unpack[LocalOptions],
) -> LocalJob:
    """Run a command in several processes on this machine.

    Raises:
        PrepError: A process failed or was stopped. The first cause determines the exit code.
    """
    request = _load_request(command)
    processes = options["processes"]
    devices = options["devices"]
    hardware = plain_hardware(processes, devices)
    _check_hardware(request, hardware, text("{}", Option("processes", 1)))
    job = LaunchJob(command=command, name="local", env=parse_env(options["env"]))
    # The processes end with this one, also after a SIGKILL: see `die_with_parent`.
    env = {**dict(job.env), PARENT_VARIABLE: str(os.getpid())}
    name, *words = command.words
    if quiet:
        words.insert(0, "--quiet")
    with remember_signal(
        lambda _: observer.note("stopping all processes; again to quit"),
        # The processes end with this one.
        lambda: os._exit(INTERRUPTED),
    ) as poll_signal:
        running = start_processes(
            [name, *words], count=processes, devices=devices, environ=os.environ, env=env
        )
        watcher = ProcessWatcher(
            running,
            lambda index, line: observer.note(f"[{index}] {line}", QUIET),
            poll_signal,
            # After a lost process the others wait in a collective until its heartbeat is missed. A shorter time would
            # kill them before they report the cause.
            grace_s=request.heartbeat_timeout_s + GRACE_MARGIN_S,
        )
        result = watcher.wait()
    return LocalJob(processes, devices, result)


def _load_request(command: LaunchedCommand) -> _Request:
    """Return a command with its recipe. Raise UsageError for an invalid one before the job waits in a queue."""
    recipe = None
    if command.recipe:
        recipe = load_recipe(find_training_recipe(Path(command.recipe)), command.overrides).recipe
    training = _training_needs(command, recipe)
    return _Request(command=command, recipe=recipe, training=training)


def _check_hardware(request: _Request, hardware: Hardware, hint: Text) -> None:
    """Check the processes and the mesh of a command against the hardware of its job.

    Raises:
        UsageError: Each process would do the whole work, or the training does not fit.
    """
    check_process_count(request.command, hardware.nodes, hint)
    if request.training is not None:
        check_training(request.training, hardware)


def _with_recipe_file(command: LaunchedCommand) -> LaunchedCommand:
    """Return the command with the file of its recipe, e.g. of a shipped recipe.

    Scripts for other machines contain or copy the file.
    """
    if not command.recipe:
        return command
    return replace(command, recipe=str(find_training_recipe(Path(command.recipe))))


def _recipe_text(command: LaunchedCommand) -> str:
    """Return the text of a recipe, for scripts with a copy of it. Empty without a recipe."""
    if not command.recipe:
        return ""
    return find_training_recipe(Path(command.recipe)).read_text("utf-8")


def _training_needs(command: LaunchedCommand, recipe: Recipe | None) -> Training | None:
    """Return the required mesh, processes and devices of a command, or None if it computes on no mesh.

    Raises:
        UsageError: The mesh or the URL of `--out` is invalid.
    """
    # An invalid URL is an error before the job waits.
    parse_out_url(command.out)
    if not command.writes_buckets:
        check_local_path(command.out)
    if not command.has_mesh:
        return None
    if recipe is None:
        mesh = parse_mesh(command.mesh or ANY_MESH, MESH_OPTION)
        return Training(mesh=mesh, slices=ONE_SLICE, mesh_origin=MESH_OPTION)
    return Training(
        mesh=parse_mesh(recipe.mesh, Key("mesh")),
        slices=parse_slice_counts(recipe.cluster.dcn_mesh),
        num_processes=recipe.cluster.n_processes,
        local_devices=recipe.cluster.n_local_devices,
    )


def _check_output_is_kept(
    command: LaunchedCommand, event: str, option: Option | None = None
) -> None:
    """Raise UsageError if a command would write to a temporary disk."""
    if not command.writes_output or parse_out_url(command.out) is not None:
        return
    what = text("{} is no bucket", Option("out", command.out or "NAME"))
    hints: list[Text | str] = []
    if option is not None:
        what = text("{} is missing", Option(option.name))
        hints.append(text("{}", option))
    if not command.writes_buckets:
        hints.append(text("{}: its nodes share a folder", Command("launch", "slurm")))
    elif command.name == TRAIN:
        hints.append("`-- --out gs://BUCKET/RUN`")
    else:
        hints.append(f"`-- {command.name} ... --out gs://BUCKET/NAME`")
    raise usage_error(what, f"the output is lost when {event}", join_texts(", or ", hints))


def _script_job(
    command: LaunchedCommand, options: ScriptOptions, name: str, max_restarts: int = MAX_RESTARTS
) -> LaunchJob:
    """Return the job of a script."""
    return LaunchJob(
        command=command,
        name=name,
        setup=tuple(options["setup"]),
        env=parse_env(options["env"]),
        max_restarts=max_restarts,
    )


def _write_and_submit(target: str, script: str, options: SubmitOptions) -> LaunchedScript:
    """Write the script to a file if `out` is set, and submit it if `submit` is set."""
    out = None if options["out"] is None else Path(options["out"])
    if out is not None:
        _write_script(out, script)
    reply = submit_script(target, script) if options["submit"] else None
    return LaunchedScript(target, script, out, reply)


def _write_script(path: Path, script: str) -> None:
    check_local_path(path)
    try:
        # Paths in the script may have bytes that are not UTF-8, which Python keeps as surrogates.
        write_file(path, os.fsencode(script), overwrite=False)
    except FileExistsError:
        hint = text("{} with another name", Option("out"))
        raise usage_error(f"`{path}` already exists", "a script is not overwritten", hint) from None
    except OSError as error:
        raise io_error(path, error) from error
