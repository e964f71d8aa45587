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
from typing import Any, Unpack

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
from prepcli.core.launchers import PARENT_VARIABLE
from prepcli.core.observer import QUIET, Observer
from prepcli.core.signals import remember_signal
from prepcli.launch.engines import ENGINES
from prepcli.launch.hardware import Training, check_hardware, plain_hardware
from prepcli.launch.job import (
    HEARTBEAT_TIMEOUT_S,
    MAX_RESTARTS,
    TRAIN,
    LaunchedCommand,
    LaunchJob,
    as_label,
    parse_env,
)
from prepcli.launch.local import GRACE_MARGIN_S, LocalOptions, ProcessWatcher, start_processes
from prepcli.models.mesh import MESH_OPTION, ONE_SLICE, num_slices, parse_mesh, parse_slice_counts
from prepcli.stores.addresses import check_local_path, parse_out_url
from prepcli.stores.files import io_error, write_file
from trainer.recipe import Recipe, load_recipe

# Mesh of a command without `--mesh`: any number of devices.
ANY_MESH = "-1,1,1"
NOT_SUBMITTED = "the job was not submitted"


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


def launch_script(target: str, command: LaunchedCommand, options: Any) -> LaunchedScript:
    """Return the script of a command for an engine. Write it to `out` and submit it, if the options say so.

    Args:
        target: Name of the engine, of ENGINES.
        command: The command.
        options: Options of the engine, e.g. `SlurmOptions`.

    Raises:
        PrepError: The job cannot run, or its script cannot be written or submitted.
    """
    engine = ENGINES[target]
    recipe, training = _check_command(command)
    check_hardware(command, training, engine.hardware(options, command, training))
    is_kept = engine.kept_disk is not None and options[engine.kept_disk.name] is not None
    if engine.disk_end and not is_kept:
        _check_output_is_kept(command, engine.disk_end, engine.kept_disk)
    name = command.name if recipe is None else recipe.name
    recipe_text = ""
    if engine.has_labels:
        name = as_label(name)
        if command.recipe:
            # Scripts for other machines contain or copy the file, e.g. of a shipped recipe.
            recipe_file = find_training_recipe(Path(command.recipe))
            command = replace(command, recipe=str(recipe_file))
            recipe_text = recipe_file.read_text("utf-8")
    job = LaunchJob(
        command=command,
        name=options["job_name"] or name,
        setup=tuple(options.get("setup", ())),
        env=parse_env(options["env"]),
        max_restarts=options.get("max_restarts", MAX_RESTARTS),
        recipe_text=recipe_text,
        num_slices=1 if training is None else num_slices(training.slices),
        heartbeat_timeout_s=_heartbeat_timeout_s(recipe),
    )
    script = engine.script(job, options)
    out = None if options["out"] is None else Path(options["out"])
    if out is not None:
        _write_script(out, script)
    reply = submit_script(target, script) if options["submit"] else None
    return LaunchedScript(target, script, out, reply)


def launch_local(
    command: LaunchedCommand,
    observer: Observer,
    *,
    quiet: bool = False,
    **options: Unpack[LocalOptions],
) -> LocalJob:
    """Run a command in several processes on this machine.

    Args:
        command: The command.
        observer: Receives the lines of all processes.
        quiet: Let the processes show errors only.
        **options: See `LocalOptions`.

    Raises:
        PrepError: A process failed or was stopped. The first cause determines the exit code.
    """
    recipe, training = _check_command(command)
    processes = options["processes"]
    devices = options["devices"]
    check_hardware(command, training, plain_hardware(processes, devices, option="processes"))
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
            grace_s=_heartbeat_timeout_s(recipe) + GRACE_MARGIN_S,
        )
        result = watcher.wait()
    return LocalJob(processes, devices, result)


def _check_command(command: LaunchedCommand) -> tuple[Recipe | None, Training | None]:
    """Return the recipe of a command, and its required mesh, processes and devices.

    Each is None if the command has none.

    Raises:
        UsageError: The recipe, the mesh or the URL of `--out` is invalid. Later the job would wait in a queue first.
    """
    recipe = None
    if command.recipe:
        recipe = load_recipe(find_training_recipe(Path(command.recipe)), command.overrides).recipe
    parse_out_url(command.out)
    if not command.writes_buckets:
        check_local_path(command.out)
    if not command.has_mesh:
        return recipe, None
    if recipe is None:
        mesh = parse_mesh(command.mesh or ANY_MESH, MESH_OPTION)
        return None, Training(mesh=mesh, slices=ONE_SLICE, mesh_origin=MESH_OPTION)
    return recipe, Training(
        mesh=parse_mesh(recipe.mesh, Key("mesh")),
        slices=parse_slice_counts(recipe.cluster.dcn_mesh),
        num_processes=recipe.cluster.n_processes,
        local_devices=recipe.cluster.n_local_devices,
    )


def _heartbeat_timeout_s(recipe: Recipe | None) -> float:
    return HEARTBEAT_TIMEOUT_S if recipe is None else recipe.cluster.heartbeat_timeout


def _check_output_is_kept(command: LaunchedCommand, event: str, option: Option | None) -> None:
    """Raise UsageError if a command would write to a disk that ends at an event. `option` sets a permanent one."""
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


def submit_line(target: str, path: Path) -> str:
    """Return the shell command to submit the script in a file.

    >>> submit_line("slurm", Path("job.sh"))
    'sbatch --parsable < job.sh'
    >>> submit_line("sky", Path("job.yaml"))
    'sky jobs launch --yes --async job.yaml'
    """
    file = shlex.quote(str(path))
    engine = ENGINES[target]
    command = shlex.join(engine.submit)
    if engine.submitted == "file":
        return f"{command} {file}"
    if engine.submitted == "program":
        program = _ray_program(f"$(base64 < {file} | tr -d '\\n')")
        return f'{command} "{program}"'
    return f"{command} < {file}"


def submit_script(target: str, script: str) -> str:
    """Submit a script and return the reply of the engine."""
    engine = ENGINES[target]
    command = engine.submit
    if engine.submitted == "file":
        with tempfile.TemporaryDirectory(prefix="prep-") as folder:
            path = Path(folder) / "job.yaml"
            path.write_bytes(os.fsencode(script))
            return _run([*command, str(path)])
    if engine.submitted == "program":
        program = _ray_program(base64.b64encode(os.fsencode(script)).decode())
        return _run([*command, program], name=shlex.join(command))
    return _run(command, script, failure="the job failed" if engine.waits else NOT_SUBMITTED)


def _ray_program(encoded: str) -> str:
    """Return the Python program to run a driver in base64.

    Ray passes the words of a job through a shell. Ray 2.50 quotes them with the rules of Windows, and the shell would
    expand `$` and backticks in the driver. The program has no such characters. Ray quotes it because it has spaces.
    """
    return f"import base64; exec(base64.b64decode('{encoded}'))"


def _run(
    command: Sequence[str], stdin: str = "", *, name: str = "", failure: str = NOT_SUBMITTED
) -> str:
    """Run a command and return its stdout. An error names it by `name`, or else by all words."""
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
