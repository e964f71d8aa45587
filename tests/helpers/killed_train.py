"""`prep train` that kills itself, run as `python -m tests.helpers.killed_train WORDS`.

Each process ends with SIGKILL when it asks for the batch after the first KILL_AFTER training batches.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from prepcli.cli.main import main
from trainer.training import feed, loop

VARIABLE = "KILL_AFTER"


class KillingLoader:
    """Loads batches as `load_batch` does, until the process is killed."""

    def __init__(self, limit: int) -> None:
        self.remaining = limit

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Load a batch. Only training batches have epochs."""
        if "epochs" in options:
            if not self.remaining:
                os.kill(os.getpid(), signal.SIGKILL)
            self.remaining -= 1
        return feed.load_batch(*arguments, **options)


if __name__ == "__main__":
    loop.load_batch = KillingLoader(int(os.environ[VARIABLE]))
    sys.exit(main())
