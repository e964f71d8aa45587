"""`prep train` that kills itself, run as `python -m tests.helpers.killed_train WORDS`.

KILL_AFTER has a number of training batches and the folder of a saved step. Each process ends with SIGKILL when it asks
for the next batch and the step is saved.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from prepcli.commands.cli.main import main
from tests.helpers.waiting import wait_until
from trainer.training import feed, loop

VARIABLE = "KILL_AFTER"


class KillingLoader:
    """Loads batches as `load_batch` does, until the process is killed."""

    def __init__(self, limit: int, step: Path) -> None:
        self.remaining = limit
        self.step = step

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Load a batch. Only training batches have epochs."""
        if "epochs" in options:
            if not self.remaining:
                wait_until(self.step.exists)
                os.kill(os.getpid(), signal.SIGKILL)
            self.remaining -= 1
        return feed.load_batch(*arguments, **options)


if __name__ == "__main__":
    count, step = os.environ[VARIABLE].split(" ")
    loop.load_batch = KillingLoader(int(count), Path(step))
    sys.exit(main())
