"""Launched jobs as text and JSON."""

from __future__ import annotations

from prepcli.commands.console.ui import Report
from prepcli.commands.operations.launch import LaunchedScript, LocalJob, submit_line


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
        next_command = submit_line(launched.target, launched.out)
        return Report(str(launched.out), fields, next_command)
    return Report(launched.script.rstrip("\n"), fields, is_script=True)


def local_report(job: LocalJob) -> Report:
    """Return the report of a job on this machine."""
    fields = {
        "target": "local",
        "processes": job.processes,
        "devices": job.devices,
    }
    return Report(job.result.rstrip("\n"), fields)
