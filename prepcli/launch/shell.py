"""Lines of bash scripts. The functions do no I/O."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from prepcli.core.errors import STOPPED
from prepcli.launch.job import LaunchJob

# Pattern of the exit codes after which the same command resumes. 75: stopped by a signal, or because another
# process was lost. 131 to 159: killed by a signal. 130 is absent: it means Ctrl-C (SIGINT).
RESTARTABLE = "75 | 13[1-9] | 14? | 15?"
# The same codes, for engines with lists.
RESTARTABLE_CODES = (STOPPED, *range(131, 160))

# Sentence in the head of scripts for clouds.
NOT_RUN = "The authors of prep have not run this file on a real cloud."


def environment_lines(job: LaunchJob) -> list[str]:
    """Return the lines for the variables and the setup of a job."""
    return [*(f"export {name}={shlex.quote(value)}" for name, value in job.env), *job.setup]


def command_line(words: Sequence[str]) -> str:
    """Return words as one shell command with every word quoted."""
    return shlex.join(words)


def comment(text: str) -> str:
    """Return a text as one comment line. Bytes of paths without UTF-8 are escaped, because YAML is UTF-8."""
    valid = text.encode("utf-8", "backslashreplace").decode()
    return f"# {' '.join(valid.split())}"


def script(lines: Iterable[str]) -> str:
    """Return lines as a text with a line break at its end."""
    return "\n".join(lines) + "\n"
