"""Script that writes outputs.json and outputs_details.json.xz beside this file: digests of the outputs of commands.

`python -m tests.golden.make_outputs [WORD ...]` runs the cases of `tests/helpers/golden_cases.py`, or those with one of
the words in their name, and records their outputs in place of the recorded ones. It prints what has changed. Run it
after a change that is meant to change bytes, and add a line to CHANGELOG.md that says why.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from pathlib import Path

from tests.helpers.golden_cases import all_cases
from tests.helpers.golden_outputs import (
    Output,
    explain,
    open_site,
    read_digests,
    record,
    run_case,
)


def main() -> None:
    """Run the cases that the command line selects, print what has changed, and record it."""
    cases = all_cases()
    words = sys.argv[1:]
    selected = [name for name in cases if not words or any(word in name for word in words)]
    recorded = read_digests()
    outputs: dict[str, Output] = {}
    with (
        tempfile.TemporaryDirectory(prefix="prep-golden-") as folder,
        open_site(Path(folder)) as store,
    ):
        for name in selected:
            errors = io.StringIO()
            # Commands print the name of their output.
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
                outputs[name] = run_case(cases[name], store)
            if name not in recorded:
                print(f"`{name}` is new")
            elif recorded[name] != outputs[name].digest:
                print(explain(name, outputs[name]))
                print(errors.getvalue(), end="")
    for name in sorted(recorded.keys() - cases.keys()):
        print(f"`{name}` is no longer a case")
    record(outputs, keep=cases.keys())


if __name__ == "__main__":
    main()
