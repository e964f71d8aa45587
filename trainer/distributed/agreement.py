"""Comparison of facts that all processes of a run must share, before they compute together."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Callable, Mapping

from prepcli.core.errors import Option, PrepError, Text, join_texts, text
from prepcli.core.process_group import ProcessGroup
from trainer.distributed.rendezvous import index_ranges

# Larger differences make file times and logs of several hosts misleading.
MAX_CLOCK_DIFFERENCE_S = 5.0
# Facts that an error names.
MAX_NAMED_FACTS = 5


def check_agreement(
    group: ProcessGroup,
    facts: Mapping[str, str],
    *,
    hint: str,
    options: Mapping[str, Option] | None = None,
    warn: Callable[[str], None] | None = None,
) -> None:
    """Compare facts between all processes. Every process raises the same error if one differs.

    The processes exchange digests. They exchange the facts themselves only if a digest differs.

    Args:
        group: Processes of the run.
        facts: Values by name.
        hint: Advice in the error.
        options: Option for a fact, by name of the fact. The error shows the option in place of the
            fact.
        warn: Receives a warning on process 0 about clocks that differ. None skips the comparison.

    Raises:
        PrepError: A fact differs between processes. The error names the facts, their values and the processes.
    """
    if group.count == 1:
        return
    facts_text = json.dumps(dict(facts), sort_keys=True)
    # Processes arrive at different times. After the barrier they read their clocks at nearly the
    # same moment.
    group.barrier("clock")
    reports = group.gather(
        "agreement", f"{hashlib.sha256(facts_text.encode()).hexdigest()} {time.time()}"
    )
    if reports and warn is not None:
        _warn_of_clocks([float(report.split()[1]) for report in reports], warn)
    is_equal = len({report.split()[0] for report in reports}) == 1
    # Only process 0 has the reports. Its verdict makes all processes raise, or none.
    if group.broadcast("agreement", str(is_equal)) == str(True):
        return
    texts = group.gather("facts", json.dumps({"host": socket.gethostname(), "facts": dict(facts)}))
    differences = json.loads(group.broadcast("facts", json.dumps(_find_differences(texts))))
    what, why = _describe_differences(differences, options or {})
    raise PrepError(what, why, hint)


def _warn_of_clocks(times: list[float], warn: Callable[[str], None]) -> None:
    """Warn if the clocks of two processes differ. They report their times at the same moment."""
    first = times.index(min(times))
    last = times.index(max(times))
    difference_s = times[last] - times[first]
    if difference_s > MAX_CLOCK_DIFFERENCE_S:
        warn(
            f"the clock of process {last} is {difference_s:.0f} s ahead of the clock of process {first}"
        )


def _find_differences(texts: list[str]) -> dict[str, str]:
    """Return the facts that differ, each with its values by process.

    Args:
        texts: Host and facts of each process, as JSON. Empty except on process 0.
    """
    reports = [json.loads(report) for report in texts]
    # A fact may be missing in some processes. A dict keeps the order of the first report of each.
    names: dict[str, None] = {}
    for report in reports:
        names |= dict.fromkeys(report["facts"])
    values: dict[str, str] = {}
    for name in names:
        if line := _values_by_process(name, reports):
            values[name] = line
    return values


def _describe_differences(
    differences: Mapping[str, str], options: Mapping[str, Option]
) -> tuple[Text, Text]:
    """Return a summary of the facts that differ, and a line for each."""
    labels: list[str] = []
    lines: list[str] = []
    for name in list(differences)[:MAX_NAMED_FACTS]:
        labels.append(text("{}", options.get(name, f"`{name}`")))
        lines.append(text("{}: {}", options.get(name, name), differences[name]))
    what = text("the processes differ in {}", join_texts(", ", labels))
    if len(differences) > len(labels):
        what = text("{} and {} more", what, len(differences) - len(labels))
    return what, join_texts("\n", lines)


def _values_by_process(name: str, reports: list[dict[str, dict[str, str]]]) -> str:
    """Return the values of a fact and their processes, the most frequent value first.

    Empty if all processes have the same value. A value names the host of its first process.
    """
    indices: dict[str, list[int]] = {}
    for index, report in enumerate(reports):
        indices.setdefault(report["facts"].get(name, "not set"), []).append(index)
    if len(indices) == 1:
        return ""
    by_frequency = sorted(indices.items(), key=lambda item: -len(item[1]))
    return "; ".join(
        f"{value} in process{'es' if len(processes) > 1 else ''} {index_ranges(processes)} "
        f"(host {reports[processes[0]]['host']})"
        for value, processes in by_frequency
    )
