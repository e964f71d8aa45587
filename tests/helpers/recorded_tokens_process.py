"""One of several processes of a resumed run, each with a token cache of its own.

`python -m tests.helpers.recorded_tokens_process FOLDER IDENTITY` prints the identity of its tokens. Process 0 alone
knows that the run began with the tokens IDENTITY.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from tests.helpers.earlier_tokens import chat_config
from tests.helpers.processes import join_job
from trainer.data.tokenize import tokenize_in_group
from trainer.data.tokenize_config import RecordedTokens
from trainer.distributed.processes import CoordinatedProcesses


def main() -> None:
    """Tokenize together with the other processes."""
    join_job()
    group = CoordinatedProcesses()
    folder, identity = sys.argv[1:]
    config = chat_config(Path(folder, f"host{group.index}"))
    if group.index == 0:
        config = replace(config, recorded=RecordedTokens((identity,), None))
    tokens = tokenize_in_group(config, group, progress=lambda *counts: None, note=lambda line: None)
    group.barrier("end")
    print(tokens.identity)


if __name__ == "__main__":
    main()
