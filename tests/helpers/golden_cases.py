"""Cases of the golden outputs: commands x models x layouts x storages, to a folder and to a bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.helpers.golden_inputs import WRITERS

BUCKET = "gs://bucket"
# Function of the Python API that writes an output and has no command.
SAVE_PARAMS = "prep.save_params"
STORAGES = ("ocdbt", "zarr3", "files", "zarr3-files")
MESH = ("--mesh", "1,2,2", "--pad-vocab", "8")
HALVES = ("--mesh", "1,2,1")
QUANTIZED = tuple(name for name in WRITERS if name.startswith("q-"))
DECODERS = (
    "gpt_neo", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "t5", "mamba2", "gemma2",
    "gemma3_text", "qwen2", "qwen3", "phi3", "gpt_neox", "llama4_text",
)  # fmt: skip
# Format of each layout of `prep export`, the default one first.
LAYOUT_FORMATS: Mapping[str, tuple[str, ...]] = {
    "hf": ("safetensors", "dcp"),
    "hf-flax": ("msgpack",),
    "easylm": ("stream",),
    "easylm-scanned": ("stream",),
    "maxtext": ("orbax",),
    "maxtext-unscanned": ("orbax",),
    "tunix": ("orbax",),
    "levanter": ("tensorstore",),
    "levanter-unscanned": ("tensorstore",),
    "torchtitan": ("dcp",),
}
FOREIGN = (
    "torch", "torch-sharded", "flax", "flax-sharded", "flax-neo", "flax-t5", "easylm-stream", "meta", "hf-dcp",
    "dcp-plain", "hf-flax-msgpack", "maxtext-orbax", "maxtext-unscanned-orbax", "tunix-orbax",
    "levanter-tensorstore", "torchtitan-dcp",
)  # fmt: skip
# Configs of sources that have none.
CONFIGS = {
    "easylm-stream": "easylm-config",
    "hf-dcp": "llama",
    "maxtext-orbax": "llama",
    "maxtext-unscanned-orbax": "llama",
    "tunix-orbax": "llama",
    "levanter-tensorstore": "llama",
    "torchtitan-dcp": "llama",
}


@dataclass(frozen=True)
class Case:
    """One command, and the name of its output.

    `inputs` are made in the working folder before the command. The values of an output `is_trained` depend on the
    processor and on the version of JAX, so that its digest covers names, sizes and settings only.
    """

    words: tuple[str, ...]
    inputs: tuple[str, ...]
    out: str = "out"
    is_trained: bool = False

    @property
    def is_compressed(self) -> bool:
        """Whether the output has bytes of the zstd library."""
        return "--compress" in self.words

    @property
    def package(self) -> str:
        """Package that the command needs beside the extra `test`, or an empty string."""
        return "sentencepiece" if self.inputs[0].startswith("pieces") else ""

    @property
    def name(self) -> str:
        """Name of the case: its command line, which says everything that differs between cases."""
        text = " ".join(word.removeprefix("./") for word in self.words)
        return f"{text} > {self.out}" if self.out != "out" else text

    @property
    def command(self) -> list[str]:
        """Arguments of the command."""
        return [*self.words, "--out", self.out]


def case(
    command: str, source: str, *words: str, out: str = "out", also: tuple[str, ...] = ()
) -> Case:
    """Return the case of a command with one source."""
    config = CONFIGS.get(source)
    if config is not None and "--config" not in words:
        words = (*words, "--config", f"./{config}")
        also = (*also, config)
    return Case((command, f"./{source}", *words), (source, *also), out)


def save_init_cases() -> Iterator[Case]:
    """Yield conversions of every model and format, and every storage of one model."""
    for source in (
        "llama",
        "llama-bf16",
        "llama-fp16",
        "gpt2",
        *DECODERS,
        "prediction",
        "llava",
        "qwen3_vl",
    ):
        yield case("save-init", source)
        yield case("save-init", source, *HALVES, "--pad-vocab", "auto")
    for source in ("verbatim", "gpt_oss", "t5", "qwen3_next"):
        yield case("save-init", source, "--no-scan")
    yield case("save-init", "verbatim")
    yield case("save-init", "llama", "--verbatim", *HALVES)
    yield case("save-init", "verbatim", "--map", "stacked.map", *HALVES, also=("stacked.map",))
    yield case("save-init", "easylm-state", "--config", "./easylm-config", also=("easylm-config",))
    yield case("save-init", "llama", "--lock", "llama.lock", also=("llama.lock",))
    yield case("save-init", "llava", "--copy", "*processor*", *HALVES)
    yield case("save-init", "llama", "--mesh", "2,2,2", "--pad-vocab", "auto")
    for source in FOREIGN:
        yield case("save-init", source)
    yield case("save-init", "model.gguf", "--quantized", "dequantize")
    for source in QUANTIZED:
        yield case("save-init", source)
        yield case("save-init", source, "--quantized", "dequantize", *HALVES)
    for storage in STORAGES:
        for compress in ((), ("--compress", "zstd"), ("--compress", "zstd:9")):
            yield case("save-init", "llama", *MESH, "--storage", storage, *compress)
        yield case("save-init", "mixtral", *HALVES, "--storage", storage)
        yield case("save-init", "verbatim", "--storage", storage, "--compress", "zstd")
    for words in (
        ("--scan-axis", "1", *MESH), ("--no-scan", *MESH), ("--dtype", "bfloat16"), ("--dtype", "float16", *MESH),
        ("--layers", "2"), ("--rule", "mlp=fsdp", *MESH), ("--pad-vocab", "64", "--init", "mean"),
        ("--pad-vocab", "64", "--init", "normal", "--seed", "7"), ("--mesh", "fsdp:2,mp:2,sp:2", "--pad-vocab", "8"),
    ):  # fmt: skip
        yield case("save-init", "llama", *words)
    yield case("save-init", "gpt2", "--pad-vocab", "8", "--init", "mean")
    yield case("save-init", "words", *MESH)
    yield case("save-init", "llama-fp16", "--dtype", "float32", "--storage", "files")


def reshard_cases() -> Iterator[Case]:
    """Yield other meshes, storages and stackings of Orbax items."""
    for source in ("llama-init", "llama-chunks", "llama-zarr3"):
        for storage in STORAGES:
            yield case("reshard", source, "--mesh", "1,4,1", "--storage", storage)
    for compress in ("zstd", "zstd:9"):
        yield case("reshard", "llama-init", "--mesh", "1,1,4", "--compress", compress)
    for words in (
        ("--no-scan",), ("--scan-axis", "1"), ("--no-scan", "--storage", "files", *HALVES),
        ("--rule", "mlp=fsdp", "--mesh", "1,2,2"),
    ):  # fmt: skip
        yield case("reshard", "llama-init", *words)
    yield case("reshard", "llama-zarr3", "--scan")
    for source in (
        "gpt2-init", "gpt_oss-init", "t5-init", "qwen3_next-init", "verbatim-init", "llava-init", "q-fp8-init",
        "prediction-init",
    ):  # fmt: skip
        yield case("reshard", source, *HALVES)
    for words in (
        (),
        ("--params-only",),
        ("--step", "3"),
        ("--storage", "zarr3", "--compress", "zstd"),
    ):
        yield case("reshard", "run", "--mesh", "1,2,1", *words)
    for source in ("maxtext-orbax", "tunix-orbax", "levanter-tensorstore"):
        yield case("reshard", source, *HALVES)


def export_cases() -> Iterator[Case]:
    """Yield every layout and format of inits of several families, and exports of training states."""
    for source in (
        "llama", "gpt2", "gpt_neo", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "t5", "gemma2", "gemma3_text",
        "qwen2", "qwen3", "qwen3_next", "phi3", "llama4_text",
    ):  # fmt: skip
        for layout, formats in LAYOUT_FORMATS.items():
            for form in formats:
                yield case("export", f"{source}-init", "--layout", layout, "--format", form)
    for layout in ("maxtext", "tunix", "maxtext-unscanned"):
        for storage in STORAGES:
            yield case("export", "llama-init", "--layout", layout, "--storage", storage)
    for words in (
        ("--keep-padding",), ("--shard-size", "20KB"), ("--dtype", "bfloat16"),
        ("--dtype", "float16", "--keep-padding"), ("--layout", "maxtext", "--dtype", "bfloat16"),
        ("--layout", "easylm", "--keep-padding"),
    ):  # fmt: skip
        yield case("export", "llama-init", *words)
    for source in (
        "llama-bf16",
        "mamba2",
        "prediction",
        "llava",
        "qwen3_vl",
        "verbatim",
        "q-fp8",
        "q-gptq",
        "q-nf4",
    ):
        yield case("export", f"{source}-init")
    for source in ("llava", "qwen3_vl", "prediction"):
        yield case("export", f"{source}-init", "--text-only")
    yield case("export", "q-fp8-init", "--quantized", "dequantize")
    yield case("export", "stacked-init", "--map", "stacked.map", also=("stacked.map",))
    for source in (
        "llama-chunks",
        "llama-zarr3",
        "words-init",
        "maxtext-orbax",
        "levanter-tensorstore",
    ):
        yield case("export", source)
    for words in ((), ("--step", "3"), ("--dtype", "bfloat16"), ("--layout", "easylm")):
        yield case("export", "run", *words, also=("init",))
    for words in (
        (), ("--format", "dcp"), *(("--layout", tree) for tree in (
            "maxtext", "maxtext-unscanned", "levanter", "levanter-unscanned", "tunix",
        )),
    ):  # fmt: skip
        yield case("export", "run", "--training-state", *words, also=("init",))
    for tree in ("trainer", "dcp", "maxtext", "levanter", "tunix"):
        also: tuple[str, ...] = () if tree == "trainer" else ("model",)
        words = () if tree == "trainer" else ("--config", "./model")
        source = f"state-{tree}"
        yield case("save-init", source, "--training-state", *words, *HALVES, also=("run", *also))


def vocabulary_cases() -> Iterator[Case]:
    """Yield changes of the vocabulary."""
    for source in ("llama", "llama-bf16", "gpt2", "t5", "gpt_oss", "prediction", "torch"):
        yield case("pad-vocab", source, "--multiple", "8")
    for words in (
        ("--size", "160"), ("--mesh", "1,2,4"), ("--init", "mean"), ("--init", "normal", "--seed", "5"),
    ):  # fmt: skip
        yield case("pad-vocab", "llama", *words)
    for words in ((), ("--init", "zeros"), ("--init", "normal", "--seed", "5")):
        yield case("add-tokens", "words", "--tokens", "tokens.txt", *words, also=("tokens.txt",))
    yield case("add-tokens", "words-init", "--tokens", "tokens.txt", also=("tokens.txt",))
    yield case("remove-tokens", "words-added")
    yield case(
        "add-tokens", "pieces", "--tokens", "tokens.txt", "--init", "zeros", also=("tokens.txt",)
    )
    yield case("remove-tokens", "pieces-added")


def other_cases() -> Iterator[Case]:
    """Yield merges, locks, certificates, tokens and training runs."""
    for source in ("llama-init", "llama-zarr3", "t5-init"):
        yield case(SAVE_PARAMS, source)
    for base in ("llama", "llama-bf16", "llama-fp16", "torch"):
        yield Case(("merge", "./adapter", f"./{base}"), ("adapter", base))
    for source in (
        "llama",
        "llama-init",
        "torch",
        "flax",
        "meta",
        "q-gptq",
        "verbatim",
        "hf-dcp",
        "words",
    ):
        yield case("lock", source, out="lock.json")
    yield case("roundtrip", "llama", out="roundtrip.json")
    for words in ((), ("--format", "megatron")):
        yield Case(("tokenize", "recipe.toml", *words), ("recipe.toml",))
    for words in ((), ("--set", "lora.rank=2")):
        yield Case(("train", "recipe.toml", *words), ("recipe.toml",), is_trained=True)
    yield Case(("train", "recipe.toml"), ("recipe.toml",), f"{BUCKET}/out", is_trained=True)
    for words in (
        ("trained",), ("trained", "--layout", "maxtext"), ("trained", "--training-state"), ("trained-lora",),
    ):  # fmt: skip
        yield Case(("export", *words), (words[0],), is_trained=True)


def bucket_cases() -> Iterator[Case]:
    """Yield outputs in a bucket, and outputs of sources in a bucket."""
    out = f"{BUCKET}/out"
    for storage in STORAGES:
        for compress in ((), ("--compress", "zstd")):
            yield case("save-init", "llama", *MESH, "--storage", storage, *compress, out=out)
        yield case("reshard", "llama-init", "--mesh", "1,4,1", "--storage", storage, out=out)
    for source in ("gpt2", "mixtral", "t5", "verbatim", "q-fp8", "torch", "llava"):
        yield case("save-init", source, *HALVES, out=out)
    for layout, formats in LAYOUT_FORMATS.items():
        for form in formats:
            yield case("export", "llama-init", "--layout", layout, "--format", form, out=out)
    yield case("export", "llama-init", "--shard-size", "20KB", out=out)
    yield case("pad-vocab", "llama", "--init", "mean", out=out)
    yield case("add-tokens", "words", "--tokens", "tokens.txt", out=out, also=("tokens.txt",))
    yield case("remove-tokens", "words-added", out=out)
    yield Case(("merge", "./adapter", "./llama"), ("adapter", "llama"), out)
    for words in ((), ("--layout", "levanter"), ("--format", "dcp")):
        yield case("export", "run", "--training-state", *words, out=out, also=("init",))
    for source in ("llama", "llama-init", "llama-chunks", "hf-dcp", "levanter-tensorstore"):
        command = "save-init" if source in ("llama", "hf-dcp") else "export"
        config = CONFIGS.get(source)
        words = () if config is None else ("--config", f"./{config}")
        also = () if config is None else (config,)
        yield Case((command, f"{BUCKET}/{source}", *words), (source, *also))
    yield Case(("reshard", f"{BUCKET}/llama-init", "--mesh", "1,4,1"), ("llama-init",), out)


def all_cases() -> dict[str, Case]:
    """Return all cases by name."""
    groups = (
        save_init_cases(), reshard_cases(), export_cases(), vocabulary_cases(), other_cases(), bucket_cases(),
    )  # fmt: skip
    cases: dict[str, Case] = {}
    for group in groups:
        for item in group:
            if item.name in cases:
                raise ValueError(f"two cases are named {item.name!r}")
            cases[item.name] = item
    return cases


# Models that repeat the kinds of layers and names of another one.
REPEATED = (
    "gpt_neo", "mixtral", "deepseek_v3", "gemma2", "qwen2", "qwen3", "phi3", "gpt_neox", "llama4_text", "qwen3_vl",
    "llama-fp16", "torch-sharded", "flax-sharded", "flax-neo",
)  # fmt: skip
# Options whose values are forms of an output.
FORMS = ("--layout", "--format", "--storage", "--quantized", "--dtype", "--init")


def traits_of(item: Case) -> set[tuple[str, ...]]:
    """Return what a case shows: its command with each form, option, kind of source, and use of a bucket."""
    command, source, *words = item.words
    if item.is_trained:
        return {(command, "trained")}
    if "--training-state" in words:
        command = f"{command} --training-state"
    # A reshard moves the leaves of any model alike.
    is_any_model = command == "reshard" and source.endswith("-init")
    traits: set[tuple[str, ...]] = {
        (command, "source", "init" if is_any_model else source.split("/")[-1])
    }
    if source.startswith(BUCKET):
        traits.add((command, "source in a bucket"))
    if item.out.startswith(BUCKET):
        traits.add((command, "output in a bucket"))
    for option, value in zip(words, [*words[1:], ""]):
        if option in FORMS:
            traits.add((command, option, value))
        elif option.startswith("--"):
            traits.add((command, option))
    if {"--compress", "--storage"} <= {*words}:
        traits.add((command, "compressed", words[words.index("--storage") + 1]))
    return traits


def default_cases() -> set[str]:
    """Return the names of the cases of the default suite: each is the first one that shows one of its traits.

    The certificate of every way takes ten seconds. It is left out, as are models that repeat the layers of another one.
    """
    shown: set[tuple[str, ...]] = set()
    names: set[str] = set()
    for name, item in all_cases().items():
        command, source, *_ = item.words
        is_repeated = source.removeprefix("./").removesuffix("-init") in REPEATED
        if command == "roundtrip" or is_repeated or traits_of(item) <= shown:
            continue
        shown |= traits_of(item)
        names.add(name)
    return names
