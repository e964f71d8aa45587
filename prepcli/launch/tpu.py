"""The script to create a Cloud TPU and to run a command on its hosts. The functions do no I/O."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated

from prepcli.core.errors import Option, text, usage_error
from prepcli.core.formatting import did_you_mean
from prepcli.core.option_spec import REQUIRED, flag, option
from prepcli.launch.hardware import RUNTIME_VERSIONS, Hardware, Training, tpu_vm_hardware
from prepcli.launch.job import (
    NOT_RUN,
    RESTARTABLE,
    LaunchedCommand,
    LaunchJob,
    RestartOptions,
    ScriptOptions,
    check_label,
    check_texts,
    comment,
    fill_template,
)

RESOURCES = "gcloud compute tpus queued-resources"
VM = "gcloud compute tpus tpu-vm"
# Seconds between two looks at the state of a TPU.
POLL_S = 30
# A queued resource may wait days for capacity. After a preemption it stays SUSPENDED until it is deleted.
_SCRIPT = """\
#!/bin/bash
@title
@origin
@deletion
set -euo pipefail

state() {
    @resources describe @name @location --format='value(state.state)' 2>/dev/null || true
}

create() {
    while true; do
        case "$(state)" in
            ACTIVE) return ;;
            "") @resources create @name --node-id=@name @location @hardware ;;
            FAILED) echo "the TPU is FAILED" >&2; exit 1 ;;
            SUSPENDED) @delete ;;
            *) sleep @poll_s ;;
        esac
    done
}

for ((start = 0; start <= @max_restarts; start++)); do
    create
    code=0
@start
    if [ "$code" -eq 0 ] || [ "$(state)" = ACTIVE ]; then break; fi
done
exit "$code"
"""
# All hosts stop together, and start again.
_HOST_SCRIPT = """\
set -e
@environment
for ((start = 0; start <= @max_restarts; start++)); do
    code=0
    @command || code=$?
    case $code in @restartable) ;; *) break ;; esac
done
exit "$code"\
"""


class TpuOptions(ScriptOptions, RestartOptions):
    """Options of a Cloud TPU. `accelerator` and `zone` are required."""

    accelerator: Annotated[str, option("TYPE", "Create a TPU, such as v5p-256.", default=REQUIRED)]
    zone: Annotated[str, option("ZONE", "Create it in ZONE.", default=REQUIRED)]
    project: Annotated[
        str | None,
        option("NAME", "Use this project."),
    ]
    runtime_version: Annotated[
        str | None, option("NAME", "Use this TPU software. Default: by TYPE.")
    ]
    spot: Annotated[bool, flag("Use a TPU that may be preempted.")]
    detach: Annotated[bool, flag("Start the command and return.")]
    gcloud: Annotated[
        Sequence[str], option("FLAG", "Add a flag of gcloud. Repeatable.", default=())
    ]


def tpu_script(job: LaunchJob, options: TpuOptions) -> str:
    """Return the script of `gcloud` commands.

    A second run of it uses the existing TPU. After a preemption the script deletes the TPU, creates it again and
    resumes.
    """
    check_label(job.name)
    accelerator = options["accelerator"]
    names = ("accelerator", "zone", "project", "gcloud")
    check_texts(**{name: options[name] for name in names})
    for word in options["gcloud"]:
        if not word.startswith("--"):
            # It would be a second name of a TPU.
            what = text("{} is invalid", Option("gcloud", word))
            hint = text("{}", Option("gcloud", f"--{word.lstrip('-')}"))
            raise usage_error(what, "a flag of gcloud begins with two hyphens", hint)
    project = [f"--project={options['project']}"] if options["project"] else []
    location = shlex.join([f"--zone={options['zone']}", *project])
    runtime = options["runtime_version"] or _runtime_version(accelerator)
    hardware = [f"--accelerator-type={accelerator}", f"--runtime-version={runtime}"]
    if options["spot"]:
        hardware.append("--spot")
    name = shlex.quote(job.name)
    delete = f"{RESOURCES} delete {name} {location} --force --quiet"
    return fill_template(
        _SCRIPT,
        title=comment(f"Runs `{job.command.title}` on a TPU {accelerator}."),
        origin=comment(f"{NOT_RUN} Its flags are in the reference of gcloud."),
        deletion=comment(f"To delete the TPU: {delete}"),
        resources=RESOURCES,
        name=name,
        location=location,
        hardware=shlex.join([*hardware, *options["gcloud"]]),
        delete=delete,
        poll_s=POLL_S,
        max_restarts=job.max_restarts,
        start=_start_lines(job, options, location),
    )


def _start_lines(job: LaunchJob, options: TpuOptions, location: str) -> list[str]:
    """Return the lines to copy the recipe and to start the command on the hosts."""
    # All hosts at once: JAX on each host waits until every other one has connected. The disk of a host has no files of
    # the other ones, so other commands run on one host.
    workers = "--worker=all" if job.command.has_mesh else "--worker=0"
    recipe = shlex.quote(job.command.recipe_name)
    host_script = fill_template(
        _HOST_SCRIPT,
        environment=job.environment_lines,
        max_restarts=job.max_restarts,
        # Not relative to the working folder: a line of the setup may be `cd`.
        command=job.command.line(f'"$HOME"/{recipe}'),
        restartable=RESTARTABLE,
    )
    command = shlex.join(["bash", "-c", host_script])
    if options["detach"]:
        # `flock` starts nothing if the command runs there already. `setsid` and `nohup` keep it alive when the
        # connection ends.
        lock, log = (shlex.quote(f"{job.name}.{suffix}") for suffix in ("lock", "log"))
        command = f"setsid nohup flock --nonblock {lock} {command} >> {log} 2>&1 < /dev/null &"
    ssh = f"{VM} ssh {shlex.quote(job.name)} {workers} {location} --command={shlex.quote(command)}"
    # ssh would read the rest of the script if bash reads it from stdin, and the exit code would be lost.
    lines = [f"    {ssh} < /dev/null || code=$?"]
    if job.command.recipe:
        # scp reads `a:b` as a path on host a. A leading "./" makes it a local path.
        source = f"./{job.command.recipe}" if ":" in job.command.recipe else job.command.recipe
        copy = shlex.join([source, f"{job.name}:{job.command.recipe_name}"])
        lines = [
            f"    {VM} scp {copy} {workers} {location} || code=$?",
            f'    [ "$code" -ne 0 ] || {ssh} < /dev/null || code=$?',
        ]
    if options["spot"]:
        # The connections end before Google Cloud reports a preemption.
        lines.append(f'    [ "$code" -eq 0 ] || sleep {POLL_S}')
    return lines


def _runtime_version(accelerator: str) -> str:
    generation = accelerator.partition("-")[0]
    if generation not in RUNTIME_VERSIONS:
        example = Option("runtime_version", "VERSION")
        hint = did_you_mean(generation, RUNTIME_VERSIONS) or text("{}", example)
        raise usage_error(
            f"unknown TPU type `{accelerator}`", f"known: {', '.join(RUNTIME_VERSIONS)}", hint
        )
    return RUNTIME_VERSIONS[generation]


def tpu_hardware(
    options: TpuOptions, command: LaunchedCommand, training: Training | None
) -> Hardware | None:
    """Return the hosts and devices of a TPU.

    None for a generation that prep does not know. `--runtime-version` can still create it.
    """
    if training is None:
        return None
    return tpu_vm_hardware(options["accelerator"], training.num_devices)
