"""Launched jobs as text and JSON."""

from __future__ import annotations

from prepcli.console.ui import Report
from prepcli.operations.launch import LaunchedScript, LocalTraining


def script_report(launched: LaunchedScript) -> Report:
    """Return the report of a script: the reply to its submission, its file, or its text."""
    fields = {
        "target": launched.target,
        "script": launched.script,
        "output": launched.out and str(launched.out),
    }
    if launched.reply is not None:
        return Report(launched.reply, fields)
    if launched.out is not None:
        next_command = f"{launched.submit_command} < {launched.out}"
        return Report(str(launched.out), fields, next_command)
    return Report(launched.script.rstrip("\n"), fields, is_script=True)


def local_report(training: LocalTraining) -> Report:
    """Return the report of a training on this machine."""
    fields = {
        "target": "local",
        "processes": training.processes,
        "devices": training.devices,
    }
    return Report(training.result.rstrip("\n"), fields)
