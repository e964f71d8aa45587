"""Fine-tune a GPT-Neo of 20 million parameters on Python's standard library, end to end.

    python -m bench.finetune --work FOLDER [--steps 100]

Needs the `parity` extra: transformers creates the initial weights and computes the perplexity of the exported model on
the held-out sequences. Prints the loss curve and both perplexities.
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

from trainer.data.store import map_tokens, read_meta

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
    """Write the modules of the standard library as text files, and return their size in bytes."""
    folder.mkdir(parents=True)
    library = Path(sysconfig.get_paths()["stdlib"])
    total_nbytes = 0
    for source in sorted([*library.glob("*.py"), *library.glob("[a-z]*/*.py")]):
        text = source.read_text(errors="ignore")
        if text.strip():
            total_nbytes += (folder / f"{source.parent.name}.{source.stem}.txt").write_text(text)
    return total_nbytes


def write_random_model(folder: Path, corpus: Path) -> int:
    """Write a random transformers model with a tokenizer trained on the corpus, and return its parameter count."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import AutoModelForCausalLM, GPTNeoConfig, set_seed

    set_seed(0)
    model = AutoModelForCausalLM.from_config(GPTNeoConfig(**CONFIG))
    model.save_pretrained(folder)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train(
        [str(path) for path in sorted(corpus.iterdir())], VOCAB, special_tokens=["<|endoftext|>"]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return model.num_parameters()


def run_prep(work: Path, *words: str) -> dict[str, Any]:
    """Run a prep command and return its JSON output. Raise SystemExit if it fails."""
    process = subprocess.run(
        [sys.executable, "-m", "prepcli", *words, "--json"], cwd=work, stdout=subprocess.PIPE
    )
    output = json.loads(process.stdout)
    if not output["ok"]:
        raise SystemExit(f"prep {words[0]}: {output['error']}")
    return output


def perplexity(folder: Path, sequences: np.ndarray) -> float:
    """Return the perplexity of a Hugging Face model, computed by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total_loss = 0.0
    with torch.no_grad():
        for row in torch.tensor(sequences.astype(np.int64)).split(8):
            total_loss += float(model(row, labels=row).loss) * row.shape[0]
    return math.exp(total_loss / len(sequences))


def holdout_sequences(work: Path) -> np.ndarray:
    """Return the run's evaluation sequences from its token store."""
    (store,) = [path for path in (work / "run" / "data").iterdir() if path.is_dir()]
    tokens = map_tokens(store, read_meta(store), LENGTH)
    blocks = tokens.ids[: tokens.n_blocks * LENGTH].reshape(-1, LENGTH)
    return np.asarray(blocks[len(blocks) - round(len(blocks) * 0.01) :][:64])


def main() -> None:
    """Train, export, and compare the perplexities."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    work = options.work
    nbytes = write_corpus(work / "corpus")
    print(
        f"{nbytes / 1e6:.1f} MB of text, {write_random_model(work / 'model', work / 'corpus'):,} parameters"
    )
    (work / "recipe.toml").write_text(
        RECIPE.format(
            length=LENGTH, batch=BATCH, steps=options.steps, every=max(options.steps // 4, 1)
        )
    )
    result = run_prep(work, "train", "recipe.toml", "--out", "run")
    for line in map(json.loads, (work / "run" / "metrics.jsonl").read_text().splitlines()):
        print(
            {
                key: line[key]
                for key in ("step", "loss", "eval_loss", "eval_perplexity", "tokens_per_s")
                if key in line
            }
        )
    run_prep(work, "export", "run", "--out", "exported")
    transformers_perplexity = perplexity(work / "exported", holdout_sequences(work))
    prep_perplexity = result["eval_perplexity"]
    difference = abs(prep_perplexity / transformers_perplexity - 1)
    perplexities = f"prep {prep_perplexity:.6f}, transformers {transformers_perplexity:.6f}"
    print(f"perplexity: {perplexities}, relative difference {difference:.1e}")


if __name__ == "__main__":
    main()
