"""The script to create a Cloud TPU and to run a command on its hosts. The functions do no I/O."""

from __future__ import annotations

import shlex
from pathlib import PurePosixPath

from prepcli.core.errors import Option, text, usage_error
from prepcli.core.suggest import did_you_mean
from prepcli.launch.command import check_text
from prepcli.launch.job import LaunchJob, check_label
from prepcli.launch.options import TpuOptions
from prepcli.launch.shell import (
    NOT_RUN,
    RESTARTABLE,
    command_line,
    comment,
    environment_lines,
    script,
)
from prepcli.launch.tpu_topologies import TPU_GENERATIONS

# Software of a TPU VM by the generation in the name of its accelerator type.
RUNTIME_VERSIONS = {
    generation.type_prefix: generation.runtime_version
    for generation in TPU_GENERATIONS.values()
    if generation.type_prefix
}


RESOURCES = "gcloud compute tpus queued-resources"
VM = "gcloud compute tpus tpu-vm"
# Seconds between two looks at the state of a TPU.
POLL_S = 30


def tpu_script(job: LaunchJob, options: TpuOptions) -> str:
    """Return the script of `gcloud` commands.

    A second run of it uses the existing TPU. After a preemption the script deletes the TPU, creates it again and
    resumes.

    Args:
        job: The job.
        options: Options of the TPU.
    """
    check_label(job.name)
    check_text(text("{}", Option("accelerator")), options["accelerator"])
    check_text(text("{}", Option("zone")), options["zone"])
    check_text(text("{}", Option("project")), options["project"] or "")
    for flag in options["gcloud"]:
        _check_flag(flag)
    name = shlex.quote(job.name)
    location = _location_flags(options)
    delete = f"{RESOURCES} delete {name} {location} --force --quiet"
    return script(
        [
            "#!/bin/bash",
            comment(f"Runs `{job.command.title}` on a TPU {options['accelerator']}."),
            comment(f"{NOT_RUN} Its flags are in the reference of gcloud."),
            comment(f"To delete the TPU: {delete}"),
            "set -euo pipefail",
            "",
            "state() {",
            f"    {RESOURCES} describe {name} {location} --format='value(state.state)' 2>/dev/null || true",
            "}",
            "",
            *_create_lines(job, options, delete),
            "",
            f"for ((start = 0; start <= {job.max_restarts}; start++)); do",
            "    create",
            "    code=0",
            *_start_lines(job, options),
            *_preemption_lines(options),
            '    if [ "$code" -eq 0 ] || [ "$(state)" = ACTIVE ]; then break; fi',
            "done",
            'exit "$code"',
        ]
    )


def _create_lines(job: LaunchJob, options: TpuOptions, delete: str) -> list[str]:
    """Return the shell function to create the TPU and to wait until it is active.

    A queued resource may wait days for capacity. After a preemption it stays SUSPENDED until it is deleted.
    """
    name = shlex.quote(job.name)
    create = f"{RESOURCES} create {name} --node-id={name} {_location_flags(options)}"
    return [
        "create() {",
        "    while true; do",
        '        case "$(state)" in',
        "            ACTIVE) return ;;",
        f'            "") {create} {_hardware_flags(options)} ;;',
        '            FAILED) echo "the TPU is FAILED" >&2; exit 1 ;;',
        f"            SUSPENDED) {delete} ;;",
        f"            *) sleep {POLL_S} ;;",
        "        esac",
        "    done",
        "}",
    ]


def _start_lines(job: LaunchJob, options: TpuOptions) -> list[str]:
    """Return the lines to copy the recipe and to start the command on the hosts."""
    location = _location_flags(options)
    # All hosts at once: JAX on each host waits until every other one has connected. The disk of a host has no files of
    # the other ones, so other commands run on one host.
    workers = "--worker=all" if job.command.has_mesh else "--worker=0"
    recipe_file = job.command.recipe
    recipe = PurePosixPath(recipe_file).name
    lines: list[str] = []
    if recipe_file:
        # scp reads `a:b` as a path on host a. A leading "./" makes it a local path.
        source = f"./{recipe_file}" if ":" in recipe_file else recipe_file
        copy = command_line([source, f"{job.name}:{recipe}"])
        lines.append(f"    {VM} scp {copy} {workers} {location} || code=$?")
    command = _host_command(job, recipe)
    if options["detach"]:
        command = _detached(job, command)
    ssh = f"{VM} ssh {shlex.quote(job.name)} {workers} {location} --command={shlex.quote(command)}"
    # ssh would read the rest of the script if bash reads it from stdin, and the exit code would be lost.
    ssh += " < /dev/null"
    if recipe_file:
        return [*lines, f'    [ "$code" -ne 0 ] || {ssh} || code=$?']
    return [f"    {ssh} || code=$?"]


def _preemption_lines(options: TpuOptions) -> list[str]:
    """Return a pause before the state is read: the connections end before Google Cloud reports a preemption."""
    if not options["spot"]:
        return []
    return [f'    [ "$code" -eq 0 ] || sleep {POLL_S}']


def _detached(job: LaunchJob, command: str) -> str:
    """Return the command to start another one in the background of a host, unless it runs there already.

    `setsid` and `nohup` keep it alive when the connection ends.
    """
    lock = shlex.quote(f"{job.name}.lock")
    log = shlex.quote(f"{job.name}.log")
    return f"setsid nohup flock --nonblock {lock} {command} >> {log} 2>&1 < /dev/null &"


def _check_flag(flag: str) -> None:
    """Raise UsageError for a word without hyphens: it would be a second name of a TPU."""
    check_text(text("{}", Option("gcloud")), flag)
    if not flag.startswith("--"):
        what = text("{} is invalid", Option("gcloud", flag))
        hint = text("{}", Option("gcloud", f"--{flag.lstrip('-')}"))
        raise usage_error(what, "a flag of gcloud begins with two hyphens", hint)


def _location_flags(options: TpuOptions) -> str:
    project = [f"--project={options['project']}"] if options["project"] else []
    return command_line([f"--zone={options['zone']}", *project])


def _hardware_flags(options: TpuOptions) -> str:
    runtime = options["runtime_version"] or _runtime_version(options["accelerator"])
    spot = ["--spot"] if options["spot"] else []
    return command_line(
        [
            f"--accelerator-type={options['accelerator']}",
            f"--runtime-version={runtime}",
            *spot,
            *options["gcloud"],
        ]
    )


def _runtime_version(accelerator: str) -> str:
    generation = accelerator.partition("-")[0]
    if generation not in RUNTIME_VERSIONS:
        example = Option("runtime_version", "VERSION")
        hint = did_you_mean(generation, RUNTIME_VERSIONS) or text("{}", example)
        raise usage_error(
            f"unknown TPU type `{accelerator}`", f"known: {', '.join(RUNTIME_VERSIONS)}", hint
        )
    return RUNTIME_VERSIONS[generation]


def _host_command(job: LaunchJob, recipe: str) -> str:
    """Return the command of every host: all of them stop together, and start again."""
    command = command_line(["prep", *job.command.words])
    if recipe:
        name, _, *words = job.command.words
        # Not relative to the working folder: a line of the setup may be `cd`.
        command = f'prep {name} "$HOME"/{command_line([recipe, *words])}'
    lines = [
        "set -e",
        *environment_lines(job),
        f"for ((start = 0; start <= {job.max_restarts}; start++)); do",
        "    code=0",
        f"    {command} || code=$?",
        f"    case $code in {RESTARTABLE}) ;; *) break ;; esac",
        "done",
        'exit "$code"',
    ]
    return command_line(["bash", "-c", "\n".join(lines)])
