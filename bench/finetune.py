"""A real fine-tune from end to end: a GPT-Neo of 20 million parameters learns Python from the standard library.

    python -m bench.finetune --work FOLDER [--steps 100]

Needs the `parity` extra: transformers makes the first weights and says in the end what the exported model's perplexity
is, on the sequences that prep held out. Prints the curve and both perplexities.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

VOCAB, LENGTH, BATCH = 8190, 128, 8  # no mesh divides 8190 by 4
CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 448,
    "num_layers": 7,
    "num_heads": 8,
    "attention_types": [[["global", "local"], 3], [["global"], 1]],
    "window_size": 64,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
RECIPE = """\
seed = 1
model.path = "model"
data = {{ type = "text", path = "corpus", seq_length = {length}, holdout = 0.01 }}
batch.size = {batch}
optimizer = {{ lr = 1e-3, schedule = "cosine", warmup_steps = 10, weight_decay = 0.1, b2 = 0.95 }}
train = {{ steps = {steps}, log_every = 10, eval_every = {every} }}
eval.limit = 64
"""


def write_corpus(folder: Path) -> int:
    """The modules of the standard library and of its packages, as text; bytes."""
    folder.mkdir(parents=True)
    library = Path(sysconfig.get_paths()["stdlib"])
    total = 0
    for source in sorted([*library.glob("*.py"), *library.glob("[a-z]*/*.py")]):
        text = source.read_text(errors="ignore")
        if text.strip():
            total += (folder / f"{source.parent.name}.{source.stem}.txt").write_text(text)
    return total


def write_random_model(folder: Path, corpus: Path) -> int:
    """A random model of transformers with a tokenizer made for the texts; its parameters."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import AutoModelForCausalLM, GPTNeoConfig, set_seed

    set_seed(0)
    made = AutoModelForCausalLM.from_config(GPTNeoConfig(**CONFIG))
    made.save_pretrained(folder)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(path) for path in sorted(corpus.iterdir())], VOCAB, special_tokens=["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return made.num_parameters()


def run_prep(work: Path, *words: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "prepcli", *words, "--json"], cwd=work, stdout=subprocess.PIPE)
    found = json.loads(done.stdout)
    if not found["ok"]:
        raise SystemExit(f"prep {words[0]}: {found['error']}")
    return found


def perplexity(folder: Path, sequences: np.ndarray) -> float:
    """Of a Hugging Face folder, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total = 0.0
    with torch.no_grad():
        for row in torch.tensor(sequences.astype(np.int64)).split(8):
            total += float(made(row, labels=row).loss) * row.shape[0]
    return math.exp(total / len(sequences))


def holdout_sequences(work: Path) -> np.ndarray:
    """The sequences that the run evaluated on, cut from its token store."""
    (store,) = [path for path in (work / "run" / "data").iterdir() if path.is_dir()]
    meta = json.loads((store / "meta.json").read_bytes())
    ids = np.memmap(store / "tokens.bin", np.dtype(meta["dtype"]).newbyteorder("<"), "r")
    blocks = ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)
    return np.asarray(blocks[len(blocks) - round(len(blocks) * 0.01) :][:64])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    asked = parser.parse_args()
    work = asked.work
    nbytes = write_corpus(work / "corpus")
    print(f"{nbytes / 1e6:.1f} MB of text, {write_random_model(work / 'model', work / 'corpus'):,} parameters")
    (work / "recipe.toml").write_text(
        RECIPE.format(length=LENGTH, batch=BATCH, steps=asked.steps, every=max(asked.steps // 4, 1))
    )
    found = run_prep(work, "train", "recipe.toml", "--out", "run")
    for line in map(json.loads, (work / "run" / "metrics.jsonl").read_text().splitlines()):
        print(
            {key: line[key] for key in ("step", "loss", "eval_loss", "eval_perplexity", "tokens_per_s") if key in line}
        )
    run_prep(work, "export", "run", "--out", "exported")
    theirs = perplexity(work / "exported", holdout_sequences(work))
    ours = found["eval_perplexity"]
    print(f"perplexity: prep {ours:.6f}, transformers {theirs:.6f}, relative difference {abs(ours / theirs - 1):.1e}")


if __name__ == "__main__":
    main()
