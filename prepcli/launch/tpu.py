"""The script that creates a Cloud TPU and trains on all of its hosts. The functions do no I/O."""

from __future__ import annotations

import shlex
from pathlib import PurePosixPath

from prepcli.errors import Option, text, usage_error
from prepcli.launch.job import LaunchJob, check_label, check_text
from prepcli.launch.options import TpuOptions
from prepcli.launch.shell import RESTARTABLE, command_line, comment, environment_lines, script
from trainer.models.suggest import did_you_mean
from trainer.planning.tpu_topologies import TPU_GENERATIONS

# Software of a TPU VM by the generation in the name of its accelerator type.
RUNTIME_VERSIONS = {
    generation.type_prefix: generation.runtime_version
    for generation in TPU_GENERATIONS.values()
    if generation.type_prefix
}


def tpu_script(job: LaunchJob, options: TpuOptions) -> str:
    """Return the script of `gcloud` commands. A second run of it uses the existing TPU."""
    check_label(job.name)
    check_text(text("{}", Option("accelerator")), options["accelerator"])
    check_text(text("{}", Option("zone")), options["zone"])
    check_text(text("{}", Option("project")), options["project"] or "")
    name = shlex.quote(job.name)
    location = _location_flags(options)
    resources = "gcloud compute tpus queued-resources"
    vm = "gcloud compute tpus tpu-vm"
    recipe = PurePosixPath(job.recipe).name
    # scp reads `a:b` as a path on host a. A leading "./" makes it a local path.
    copy = command_line(
        ["./" + job.recipe if ":" in job.recipe else job.recipe, f"{job.name}:{recipe}"]
    )
    return script(
        [
            "#!/bin/bash",
            comment(f"Trains {job.recipe} on all hosts of a TPU {options['accelerator']}."),
            comment(f"To delete the TPU: {resources} delete {name} {location} --force"),
            "set -euo pipefail",
            "",
            # A queued resource may wait days for capacity. A second run of the script finds the existing one.
            f"if ! {resources} describe {name} {location} >/dev/null 2>&1; then",
            f"    {resources} create {name} --node-id={name} {location} {_hardware_flags(options)}",
            "fi",
            "",
            "state=",
            'until [ "$state" = ACTIVE ]; do',
            f"    state=$({resources} describe {name} {location} --format='value(state.state)')",
            "    case $state in",
            "        ACTIVE) ;;",
            '        FAILED | SUSPENDING | SUSPENDED) echo "the TPU is $state" >&2; exit 1 ;;',
            "        *) sleep 30 ;;",
            "    esac",
            "done",
            "",
            f"{vm} scp {copy} --worker=all {location}",
            # All hosts at once: JAX on each host waits until every other one has connected.
            f"{vm} ssh {name} --worker=all {location} --command={shlex.quote(_host_command(job, recipe))}",
        ]
    )


def _location_flags(options: TpuOptions) -> str:
    project = [f"--project={options['project']}"] if options["project"] else []
    return command_line([f"--zone={options['zone']}", *project])


def _hardware_flags(options: TpuOptions) -> str:
    runtime = options["runtime_version"] or _runtime_version(options["accelerator"])
    spot = ["--spot"] if options["spot"] else []
    return command_line(
        [f"--accelerator-type={options['accelerator']}", f"--runtime-version={runtime}", *spot]
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
    # Not relative to the working folder: a line of the setup may be `cd`.
    train = f'prep train "$HOME"/{command_line([recipe, *job.train_words])}'
    lines = [
        "set -e",
        *environment_lines(job),
        f"for ((start = 0; start <= {job.max_restarts}; start++)); do",
        "    code=0",
        f"    {train} || code=$?",
        f"    case $code in {RESTARTABLE}) ;; *) break ;; esac",
        "done",
        'exit "$code"',
    ]
    return command_line(["bash", "-c", "\n".join(lines)])
