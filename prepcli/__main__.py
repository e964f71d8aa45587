"""The process of `prep`: Ctrl-C before and after the command ends it without a traceback.

This module imports no other one at its top. The imports of the command line take most of the first half second.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType


def main() -> int:
    """Run the command of `sys.argv`, and return its exit code."""
    _handle_interrupt(_quit)
    # NumPy loads OpenBLAS, which starts a thread per core. Each would spin for 50 ms before it sleeps, also in commands
    # that multiply no matrices. The unit is the logarithm of cycles.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    from prepcli.commands.cli.main import main as run_command

    try:
        code = run_command()
        # The exit of the interpreter takes longer than some commands. Job managers repeat a signal within this time. It
        # must not change the code.
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        if code:
            # Its error is reported.
            _handle_interrupt(lambda number, frame: os._exit(code))
        else:
            _handle_interrupt(_quit)
        return code
    finally:
        # If a KeyboardInterrupt ended code that was made from a string, e.g. the methods of a dataclass, Python would
        # send SIGINT to itself in place of the exit code. The next string of code resets this.
        exec("")


def _handle_interrupt(handler: Callable[[int, FrameType | None], None]) -> None:
    """Let Ctrl-C end the process at once: there is no work to keep or to clean up."""
    # Shells start background commands of scripts with Ctrl-C ignored.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


def _quit(number: int, frame: FrameType | None) -> None:
    # Printed without the Ui, which may not be imported yet. A KeyboardInterrupt would print the traceback of an import.
    os.write(2, b"error: interrupted\n")
    # 128 + SIGINT, as in `prepcli.core.errors`, which may not be imported yet.
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
