"""The worker process that decodes tables: signals to all processes of a job."""

from __future__ import annotations

import io
import os
import signal

import pytest

from trainer.tables import process
from trainer.tables.batches import ARROW, Part
from trainer.tables.process import read_table


def arrow_file(num_batches: int) -> bytes:
    """Return an Arrow file with batches of two rows."""
    pyarrow = pytest.importorskip("pyarrow")
    batch = pyarrow.RecordBatch.from_pydict({"text": ["a", "b"]})
    sink = io.BytesIO()
    with pyarrow.ipc.new_file(sink, batch.schema) as writer:
        for _ in range(num_batches):
            writer.write_batch(batch)
    return sink.getvalue()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_worker_survives_signals_to_the_job(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
):
    data = arrow_file(num_batches=3)
    workers: list[process._Worker] = []

    def take_worker() -> process._Worker:
        workers.append(process._Worker())
        return workers[0]

    monkeypatch.setattr(process, "_take_worker", take_worker)
    parts = read_table(io.BytesIO(data), ARROW, len(data), 1 << 20)
    rows = [next(parts)]
    os.kill(workers[0]._process.pid, number)
    rows += [*parts]
    assert [part.first_row for part in rows if isinstance(part, Part)] == [1, 3, 5]
