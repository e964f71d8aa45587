"""What the demo starts from: a tiny GPT-Neo in Hugging Face format with random weights, a text, and a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from prepcli.algebra.axis_map import bind_row
from prepcli.commands.testing.checkpoints import write_checkpoint
from prepcli.models.parameters import parameter_rows
from prepcli.models.registry import FAMILIES

# Names in the demo's folder.
RESHARDED = "tiny-padded-1x2x4"
TEXT = "tiny.txt"
SEED = 0
STD = 0.02
END_TOKEN = "<|endoftext|>"
UNKNOWN_TOKEN = "<unk>"
# Syllables of one or two letters after a consonant, e.g. `ba`, `bai`, `ban`.
ENDINGS = [*"aeiou", "ai", "ei", "ou", "an", "en", "in", "on", "un", "al", "el", "ol", "ul"]
WORDS = tuple(consonant + ending for consonant in "bdfghklmnprstvz" for ending in ENDINGS)
# 257 words: an odd size that no mesh divides.
VOCABULARY = (END_TOKEN, UNKNOWN_TOKEN, *WORDS)
CONFIG = {
    "architectures": ["GPTNeoForCausalLM"],
    "model_type": "gpt_neo",
    "vocab_size": len(VOCABULARY),
    "hidden_size": 512,
    "num_layers": 4,
    "num_heads": 8,
    # GPT-Neo takes None as 4 * hidden_size = 2048.
    "intermediate_size": None,
    # Two times global and local: 4 layers.
    "attention_types": [[["global", "local"], 2]],
    "window_size": 64,
    "max_position_embeddings": 256,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "initializer_range": STD,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": CONFIG["max_position_embeddings"],
    "bos_token": END_TOKEN,
    "eos_token": END_TOKEN,
    "unk_token": UNKNOWN_TOKEN,
}
# A model that never saw these words learns them in a few steps.
TEXT_WORDS = WORDS[:64]
SENTENCES = 2000
SENTENCE_WORDS = 12
# Number of words that may follow each word.
FOLLOWERS = 2
STEPS = 12
SAVE_EVERY = 4
RECIPE_TEXT = f"""\
# A tiny GPT-Neo learns a language of {len(TEXT_WORDS)} words; {FOLLOWERS} different words may follow each word.
seed = 1
mesh = "1,2,4"                # dp, fsdp, mp: 8 devices

[model]
path = "{RESHARDED}"

[data]
type = "text"
path = "{TEXT}"
seq_length = 32
holdout = 0.02

[batch]
size = 8                      # sequences per step

[optimizer]
lr = 6e-4
schedule = "cosine"
warmup_steps = 2
weight_decay = 0.1

[train]
steps = {STEPS}
log_every = 1
eval_every = {STEPS // 2}

[checkpoint]
every = {SAVE_EVERY}
"""


def write_tiny_model(folder: Path) -> int:
    """Write the model to a new folder: weights in three files, settings, and a word-level tokenizer.

    Return the bytes of the weights. Each call writes the same files.
    """
    family = FAMILIES["gpt_neo"]
    sizes = family.sizes(CONFIG)
    tensors: dict[str, np.ndarray] = {}
    for path, row in parameter_rows(family, CONFIG).items():
        # The tied head is not stored.
        if path == family.tying.head_leaf:
            continue
        axis_map = bind_row(row, sizes)
        for name, _ in axis_map.tensors():
            shape = axis_map.source_shape
            # The name seeds the values, so they do not depend on the order of the tensors.
            random = np.random.default_rng([SEED, *name.encode()])
            values = random.standard_normal(shape, np.float32) * np.float32(STD)
            # The scale of a norm is the only weight with one dim. It is around 1.
            is_scale = len(shape) == 1 and name.endswith(".weight")
            tensors[family.prefix + name] = values + np.float32(is_scale)
    write_checkpoint(folder, CONFIG, dict(sorted(tensors.items())), files=2)
    (folder / "generation_config.json").write_text('{"bos_token_id": 0, "eos_token_id": 0}')
    # One token per word, words separated by spaces.
    vocabulary = {token: number for number, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(vocabulary, UNKNOWN_TOKEN))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([END_TOKEN, UNKNOWN_TOKEN])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    return sum(tensor.nbytes for tensor in tensors.values())


def learnable_text() -> str:
    """Return a text in a learnable language, in which only a few words may follow each word."""
    random = np.random.default_rng(SEED)
    followers = random.integers(0, len(TEXT_WORDS), (len(TEXT_WORDS), FOLLOWERS))
    lines: list[str] = []
    for _ in range(SENTENCES):
        word = int(random.integers(len(TEXT_WORDS)))
        words: list[str] = []
        for choice in random.integers(0, FOLLOWERS, SENTENCE_WORDS):
            words.append(TEXT_WORDS[word])
            word = int(followers[word, choice])
        lines.append(" ".join(words) + "\n")
    return "".join(lines)
