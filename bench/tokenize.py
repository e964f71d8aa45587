"""Tokenize English-like text with prep, with other libraries alone, and with `datasets.map`.

    python -m bench.tokenize --work FOLDER --megabytes 500 --rounds 3
    python -m bench.tokenize --work FOLDER --megabytes 100 --systems raw,transformers,tiktoken,prep
    python -m bench.tokenize --work FOLDER --megabytes 50 --kills 20

The corpus is JSON Lines of sentences of Zipf-distributed words. The tokenizer is a byte-level BPE of 32,000 tokens like
GPT-2's, trained on a part of it. Systems alternate, each in a process of its own. Times are those of the work without
imports. Memory is that of the process tree. No extra has tiktoken. `--kills` kills prep at random moments until
the corpus is tokenized, and compares the store with that of an undisturbed run.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from bench.meter import measure
from prepcli.core.sandbox import stop_idle
from prepcli.core.tables import format_table
from trainer.data.examples import ExampleSettings
from trainer.data.tokenize import tokenize_files
from trainer.data.tokenize_config import TokenizeConfig

CORPUS, TOKENIZER, STORES, DATASETS = "corpus.jsonl", "tokenizer.json", "stores", "datasets"
VOCAB, BATCH_DOCUMENTS = 32_000, 1000
END_TOKEN = "<|end|>"
# The expression of GPT-2, as tiktoken has it.
GPT_2_EXPRESSION = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
)
SENTENCES, WORDS = 50_000, 60_000
MAX_KILL_S = 4.0
REPORTING = "prep-reporting"  # prep with progress: a line of bytes done after each batch


def write_corpus(folder: Path, nbytes: int) -> None:
    """Write a corpus of at least the given bytes, and train the tokenizer on its first sentences."""
    rng = random.Random(0)
    sentences = make_sentences(rng)
    with (folder / CORPUS).open("w") as file:
        while file.tell() < nbytes:
            text = " ".join(rng.choices(sentences, k=rng.randint(5, 60)))
            file.write(json.dumps({"text": text}) + "\n")
    train_tokenizer(sentences[: SENTENCES // 5]).save(str(folder / TOKENIZER))


def make_sentences(rng: random.Random) -> list[str]:
    """Return sentences of random words with the frequencies of a natural language."""
    syllables = [first + vowel for first in "bcdfghjklmnprstvw" for vowel in "aeiou"]
    words = [
        "".join(rng.choices(syllables, k=rng.choice((1, 1, 2, 2, 3, 4)))) for _ in range(WORDS)
    ]
    weights = list(itertools.accumulate(1 / (rank + 2.7) for rank in range(WORDS)))
    return [
        " ".join(rng.choices(words, cum_weights=weights, k=rng.randint(4, 25))).capitalize() + "."
        for _ in range(SENTENCES)
    ]


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Return a tokenizer like GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END_TOKEN], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def read_batches(folder: Path) -> Iterator[list[str]]:
    """Yield the documents in lists of BATCH_DOCUMENTS."""
    with (folder / CORPUS).open() as file:
        for lines in iter(lambda: list(itertools.islice(file, BATCH_DOCUMENTS)), []):
            yield [json.loads(line)["text"] for line in lines]


def prepare_raw(folder: Path) -> Callable[[], None]:
    """Return the loop that encodes the documents with `encode_batch_fast` on all cores, and drops the ids."""
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))

    def run() -> None:
        for texts in read_batches(folder):
            for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                _ = encoding.ids

    return run


def prepare_transformers(folder: Path) -> Callable[[], None]:
    """Return the loop that calls the tokenizer of transformers, and drops the ids."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / TOKENIZER))

    def run() -> None:
        for texts in read_batches(folder):
            tokenizer(texts, add_special_tokens=False, return_attention_mask=False)

    return run


def prepare_tiktoken(folder: Path) -> Callable[[], None]:
    """Return the loop that encodes the documents with the tiktoken of the same merges, and drops the ids."""
    import tiktoken  # pyright: ignore[reportMissingImports]
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    vocab = Tokenizer.from_file(str(folder / TOKENIZER)).get_vocab()
    special = {END_TOKEN: vocab.pop(END_TOKEN)}
    # The trainer of `tokenizers` numbers the tokens in the order of the merges.
    ranks = {bytes(byte_of[char] for char in token): rank for token, rank in vocab.items()}
    tokenizer = tiktoken.Encoding(
        "bench", pat_str=GPT_2_EXPRESSION, mergeable_ranks=ranks, special_tokens=special
    )

    def run() -> None:
        for texts in read_batches(folder):
            tokenizer.encode_ordinary_batch(texts, num_threads=os.cpu_count() or 1)

    return run


def prepare_datasets(folder: Path) -> Callable[[], None]:
    """Return the `datasets.map` that encodes the documents in two processes. They are converted to Arrow before."""
    from datasets import load_dataset

    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    rows = load_dataset(
        "json", data_files=str(folder / CORPUS), split="train", cache_dir=str(folder / DATASETS)
    )

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encodings = tokenizer.encode_batch(batch["text"], add_special_tokens=False)
        return {"ids": [encoding.ids for encoding in encodings]}

    def run() -> None:
        rows.map(encode, batched=True, num_proc=2, remove_columns=["text"])

    return run


def prepare_prep(folder: Path) -> Callable[[], None]:
    """Return the work of prep: the token store is made and checked."""
    return lambda: make_store(folder)


def make_store(folder: Path, report: Callable[[int], None] = lambda nbytes: None) -> None:
    """Make the token store. The bytes done are reported, first those of an interrupted run."""
    config = TokenizeConfig(
        type="json",
        paths=(str(folder / CORPUS),),
        examples=ExampleSettings(fields="text"),
        seq_length=1024,
        tokenizer=folder / TOKENIZER,
        vocab=VOCAB,
        cache=folder / STORES,
    )
    tokenize_files(config, progress=lambda nbytes, *_: report(nbytes), note=lambda text: None)


SYSTEMS = {
    "raw": prepare_raw,
    "prep": prepare_prep,
    "datasets": prepare_datasets,
    "transformers": prepare_transformers,
    "tiktoken": prepare_tiktoken,
}
DEFAULT_SYSTEMS = "raw,prep,datasets"


def run_system(name: str, folder: Path) -> None:
    """Run a system in this process and print its cost as JSON."""
    work = SYSTEMS[name](folder)
    start_s, start_cpu_s = time.perf_counter(), cpu_seconds()
    work()
    seconds = time.perf_counter() - start_s
    # prep keeps the process of the tokenizer for the next call. The time of a child counts once it has ended.
    gc.collect()
    stop_idle()
    print(json.dumps({"seconds": seconds, "cpu_s": cpu_seconds() - start_cpu_s}), flush=True)


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def compare(folder: Path, systems: Sequence[str], rounds: int) -> str:
    """Return a table of rates and peak memory. Systems alternate, in the reverse order in every second round."""
    megabytes = (folder / CORPUS).stat().st_size / 1e6
    costs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in systems}
    for number in range(rounds):
        for name in systems if number % 2 == 0 else [*reversed(systems)]:
            for leftover in (STORES, DATASETS):
                shutil.rmtree(folder / leftover, ignore_errors=True)
            run = measure(child_command("--run", name, folder=folder))
            if run.exit_code:
                raise SystemExit(run.stderr)
            cost = json.loads(run.stdout.strip().splitlines()[-1])
            costs[name].append(
                (megabytes / cost["seconds"], megabytes / cost["cpu_s"], run.peak_nbytes / 2**20)
            )
            print(name, costs[name][-1], file=sys.stderr, flush=True)
    rows = [
        (name, *(f"{statistics.median(column):.2f}" for column in zip(*costs[name])))
        for name in systems
    ]
    return format_table(
        rows, ("system", "MB/s", "MB per CPU second", "peak MiB"), right_aligned=("MB/s",)
    )


def child_command(*arguments: str, folder: Path) -> list[str]:
    """Return the command of this program in another process."""
    return [sys.executable, "-m", "bench.tokenize", "--work", str(folder), *arguments]


def kill_runs(folder: Path, count: int, rng: random.Random) -> str:
    """Kill runs at random moments, then compare the store with that of an undisturbed one, and return the result."""
    shutil.rmtree(folder / STORES, ignore_errors=True)
    make_store(folder)
    expected = read_store(folder)
    redone, kills = [], 0
    while kills < count:
        shutil.rmtree(folder / STORES)
        done_nbytes = 0
        while kills < count and (lines := kill_run(folder, rng.uniform(0, MAX_KILL_S))) is not None:
            kills += 1
            if lines:
                redone.append(done_nbytes - lines[0])
                done_nbytes = lines[-1]
        make_store(folder)
        if read_store(folder) != expected:
            raise SystemExit("the store differs from that of an undisturbed run")
    mean, most = statistics.mean(redone) / 2**20, max(redone) / 2**20
    return f"{kills} kills, all stores equal; text tokenized twice: mean {mean:.2f} MiB, most {most:.2f} MiB"


def kill_run(folder: Path, seconds: float) -> list[int] | None:
    """Kill a run some seconds after it begins to tokenize. Return the bytes done over time, or None if it ended."""
    command = child_command("--run", REPORTING, folder=folder)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        lines = [process.stdout.readline()]
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
    if process.returncode == 0:
        return None
    return [int(line) for line in lines if line.endswith("\n")]


def read_store(folder: Path) -> dict[str, bytes]:
    """Return the files of the only store. Raise ValueError if there are other folders."""
    (store,) = (path for path in (folder / STORES).iterdir() if path.is_dir())
    return {str(path): path.read_bytes() for path in sorted(store.rglob("*")) if path.is_file()}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", default=DEFAULT_SYSTEMS)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.work
    if options.run == REPORTING:
        make_store(folder, lambda nbytes: print(nbytes, flush=True))
        return
    if options.run:
        run_system(options.run, folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / TOKENIZER).exists():
        write_corpus(folder, options.megabytes * 10**6)
    if options.kills:
        print(kill_runs(folder, options.kills, random.Random(1)))
    else:
        print(compare(folder, options.systems.split(","), options.rounds))


if __name__ == "__main__":
    main()
