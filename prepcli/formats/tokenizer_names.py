"""Names and limits of the files of a tokenizer."""

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
SENTENCEPIECE_SUFFIX = ".model"
# Files with the ids of the library. Under other names, e.g. `sentencepiece.bpe.model` of XLM-R,
# transformers shifts the ids of the library by one.
SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model")
# Vocabularies of tokenizers that transformers builds.
VOCABULARY_FILES = ("vocab.json", "vocab.txt")
# Far above any tokenizer, and below what a small machine can hold.
MAX_TOKENIZER_NBYTES = 1_000_000_000
