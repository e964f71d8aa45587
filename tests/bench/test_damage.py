"""Programs that compare results: flipped bits, restarted batches, chat templates and tokenizing processes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench import tokenize
from bench.batch_restarts import (
    BATCH_SIZE,
    MAX_PROCESSES,
    STEPS,
    Run,
    check_step,
    compare_processes,
    random_starts,
    step_digest,
)
from bench.chat_masks import main
from bench.damage import REFUSED, damage_folder, flip_all
from bench.damage_readers import (
    FOREIGN,
    QUANTIZED,
    STATE_LAYOUTS,
    Subject,
    make_subjects,
)
from bench.tokenize_processes import FILES, N_FILES, make_share, read_store_meta, write_files
from tests.trainer.data.chat_templates import END_OF_TEXT, NEXT_ROLE_ENDS, PYTHON_CALLS
from trainer.data import shards
from trainer.data.order import RowOrder
from trainer.data.packing import PackedDataset
from trainer.data.store import MappedTokens

MAX_FILES = 12
INITS = ("init", "init-files", "init-zarr3-files", "init-zstd", "resharded")
STATES = tuple(f"state-{layout}" for layout in STATE_LAYOUTS)
OTHERS = ("hf", "padded", "step", "adapter", "bucket")


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Subject]]:
    """Make the outputs of `bench.damage`, and stay in their folder."""
    with damage_folder(tmp_path_factory.mktemp("damage") / "work") as store:
        yield make_subjects(store)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*INITS, *FOREIGN, *QUANTIZED, *STATES, *OTHERS])
def test_no_command_accepts_a_flipped_bit(subjects: dict[str, Subject], name: str):
    wrong: list[str] = []
    verdicts = flip_all(subjects[name], 1, random.Random(1), wrong.append, max_files=MAX_FILES)
    assert not wrong
    for command, counts in verdicts.items():
        # A list of tensors without their values depends on few files.
        assert counts[REFUSED] or command.startswith("inspect"), command


@pytest.mark.slow
def test_every_output_is_damaged(subjects: dict[str, Subject]):
    assert {*subjects} == {*INITS, *FOREIGN, *QUANTIZED, *STATES, *OTHERS}


def make_run() -> Run:
    """Return a run of random tokens with the digests of one process."""
    ids = np.random.default_rng(0).integers(0, 9000, 1000).astype("<u2")
    tokens = MappedTokens(ids, np.array([1000], "<u8"), "x", 4)
    dataset = PackedDataset(tokens, first_row=0, n_rows=tokens.n_blocks)
    order = RowOrder(dataset.n_rows, BATCH_SIZE, seed=0, shuffle=True)
    run = Run(dataset, order, ())
    digests = [step_digest([run.shares(1, step)[0].batch(step)], step) for step in range(STEPS)]
    return Run(dataset, order, tuple(digests))


def test_schedules_take_all_steps():
    rng = random.Random(1)
    for _ in range(100):
        taken = 0
        for start, stop, of in random_starts(rng):
            assert start <= taken
            assert 1 <= of <= MAX_PROCESSES
            taken = max(taken, stop)
        assert taken == STEPS


def test_other_batches_are_noticed():
    run = make_run()
    assert compare_processes(run, [1, 7]) == STEPS * 8
    share = run.shares(1, 0)[0].batch(0)
    share["targets"][5, 2] += 1
    with pytest.raises(SystemExit, match="step 0 of 1 processes differs"):
        check_step(run, [share], 0)


def test_table_has_results_and_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers")
    (tmp_path / "glm.jinja").write_text(NEXT_ROLE_ENDS)
    (tmp_path / "marked.jinja").write_text(PYTHON_CALLS)
    assert main(["--templates", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| template | single turn | multi-turn |")
    assert lines[2] == "| glm | ids | ids | ids | error (1) | ids | ids |"
    assert lines[3] == "| marked | equal | equal | equal | equal | equal | equal |"
    assert lines[5].startswith("1. the text that chat.jinja renders does not show the tool calls")
    # It has the name of a published template with marked texts, and renders others.
    (tmp_path / "phi3_5.jinja").write_text(END_OF_TEXT.replace("|>\\n", "|>"))
    assert main(["--templates", str(tmp_path)]) == 1
    assert "| phi3_5 | other text (2) |" in capsys.readouterr().out


def test_shares_make_the_store_of_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenize, "SENTENCES", 500)
    monkeypatch.setattr(tokenize, "WORDS", 600)
    monkeypatch.setattr(shards, "SHARD_NBYTES", 10_000)
    write_files(tmp_path, 100_000)
    lines = [path.read_text().splitlines() for path in sorted((tmp_path / FILES).iterdir())]
    assert len(lines) == N_FILES
    assert make_share(tmp_path, tmp_path / FILES, 0, 2) is None
    meta = make_share(tmp_path, tmp_path / FILES, 1, 2)
    assert meta is not None
    assert meta == read_store_meta(tmp_path)
    assert meta.n_documents == sum(map(len, lines))
