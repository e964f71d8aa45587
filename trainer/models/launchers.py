"""Which process of how many this is, from the environment variables of launchers. Pure, no jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAX_PROCESSES = 1 << 16
# Name, and variables of the process count and index. Launchers set these only for commands that they run several times.
# SLURM_NTASKS is ignored: Slurm also sets it for the batch script, which runs once.
LAUNCHERS = (
    ("SLURM", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("JAX_NUM_PROCESSES", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
)


@dataclass(frozen=True, slots=True)
class LaunchedProcess:
    """Process number `index`, from 0, of `count` processes that a launcher started."""

    launcher: str
    count: int
    index: int


def detect_launcher(environ: Mapping[str, str]) -> LaunchedProcess | None:
    """Return the process described by a launcher's environment variables; None without a launcher of several.

    Args:
        environ: Environment variables.
    """
    for launcher, count_variable, index_variable in LAUNCHERS:
        count_text, index_text = environ.get(count_variable, ""), environ.get(index_variable, "")
        if _is_small_decimal(count_text) and _is_small_decimal(index_text):
            count, index = int(count_text), int(index_text)
            if index < count and 2 <= count <= MAX_PROCESSES:
                return LaunchedProcess(launcher, count, index)
    return None


def _is_small_decimal(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 9
