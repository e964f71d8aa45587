"""Pretrain a tiny T5 by span corruption on prep's own documentation, and print the loss curve.

    python -m bench.span_corruption --work FOLDER [--steps 300]

Needs the `parity` extra: transformers creates the initial weights. The last tenth of the text is held out. Its spans
are the same in every evaluation. For comparison, the loss of a model that predicts each token of a target by its
frequency alone is printed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from bench.finetune import run_prep
from trainer.data.store import map_tokens, read_meta
from trainer.recipe.data_table import span_sizes

VOCAB, N_SENTINELS, SOURCE_LENGTH = 1024, 32, 128
CONFIG = {
    "vocab_size": VOCAB,
    "d_model": 96,
    "d_kv": 24,
    "d_ff": 256,
    "num_layers": 2,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
RECIPE = """\
seed = 1
model.path = "model"
batch.size = 8
optimizer = {{ lr = 3e-3, schedule = "cosine", warmup_steps = 20 }}
train = {{ steps = {steps}, log_every = {every}, eval_every = {every} }}
[data]
type = "text"
path = "corpus"
objective = "span_corruption"
source_length = {source_length}
seq_length = 32
holdout = 0.1
"""


def write_corpus(folder: Path) -> list[str]:
    """Write the pages of the documentation as text files, and return their texts."""
    folder.mkdir(parents=True)
    root = Path(__file__).parents[1]
    texts = [
        path.read_text() for path in sorted([*root.glob("*.md"), *(root / "docs").glob("**/*.md")])
    ]
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(text)
    return texts


def write_random_model(folder: Path, texts: list[str]) -> int:
    """Write a random T5 with a tokenizer trained on the texts, and return its parameter count."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import T5Config, T5ForConditionalGeneration, set_seed

    set_seed(0)
    model = T5ForConditionalGeneration(T5Config(**CONFIG))
    model.save_pretrained(folder)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts, VOCAB - N_SENTINELS, special_tokens=["<pad>", "</s>"], show_progress=False
    )
    # The first sentinel has the last id.
    tokenizer.add_special_tokens([f"<extra_id_{i}>" for i in reversed(range(N_SENTINELS))])
    tokenizer.save(str(folder / "tokenizer.json"))
    return model.num_parameters()


def frequency_loss(cache: Path) -> float:
    """Return the entropy of the tokens of all targets: those of the store, the sentinels and the last one."""
    (store,) = cache.glob("*/")
    ids = map_tokens(store, read_meta(store), 1).ids[:]
    sizes = span_sizes(SOURCE_LENGTH, noise_density=0.15, mean_span_length=3.0)
    counts = np.concatenate(
        [np.bincount(ids) / len(ids) * sizes.n_noise, np.ones(sizes.n_spans + 1)]
    )
    frequencies = counts[counts > 0] / sizes.target_length
    return float(-(frequencies * np.log(frequencies)).sum())


def main() -> None:
    """Train, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    work = options.work
    texts = write_corpus(work / "corpus")
    print(
        f"{sum(map(len, texts)):,} characters, {write_random_model(work / 'model', texts):,} parameters"
    )
    recipe = RECIPE.format(
        steps=options.steps, every=max(options.steps // 10, 1), source_length=SOURCE_LENGTH
    )
    (work / "recipe.toml").write_text(recipe)
    run_prep(work, "train", "recipe.toml", "--out", "run")
    print(f"loss by frequency alone: {frequency_loss(work / 'run' / 'data'):.3f}")
    for line in map(json.loads, (work / "run" / "metrics.jsonl").read_text().splitlines()):
        print(
            {key: line[key] for key in ("step", "loss", "eval_loss", "tokens_per_s") if key in line}
        )


if __name__ == "__main__":
    main()
