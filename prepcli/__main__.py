"""The process of `prep`: Ctrl-C before and after the command ends it without a traceback.

This module imports no other one at its top. The imports of the command line take most of the first half second.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Run the command of `sys.argv`, and return its exit code."""
    _quit_on_interrupt()
    from prepcli.cli.main import main as run_command

    try:
        return run_command()
    finally:
        # The exit of the interpreter takes longer than some commands.
        _quit_on_interrupt()
        # If a KeyboardInterrupt ended code that was made from a string, e.g. the methods of a dataclass, Python would
        # send SIGINT to itself in place of the exit code. The next string of code resets this.
        exec("")


def _quit_on_interrupt() -> None:
    """Let Ctrl-C end the process at once: there is no work to keep or to clean up."""
    # Shells start background commands of scripts with Ctrl-C ignored.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _quit)


def _quit(number: int, frame: FrameType | None) -> None:
    # Printed without the Ui, which may not be imported yet. A KeyboardInterrupt would print the traceback of an import.
    os.write(2, b"error: interrupted\n")
    # 128 + SIGINT, as in `prepcli.errors`, which may not be imported yet.
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
