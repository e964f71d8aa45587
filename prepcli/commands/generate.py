"""`prep generate`: what a model, of any checkpoint, adds to prompts."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepcli.commands.conflicts import check_needs
from prepcli.commands.conversion import CommonOptions, check_config_option, open_checkpoint, source_line
from prepcli.commands.train import check_without_checksums, silence_jax
from prepcli.console.formatting import format_duration
from prepcli.console.ui import Report, Ui
from prepcli.engine.files import io_error
from prepcli.errors import PrepError, usage_error
from prepcli.restore.item_reader import ItemReader, open_reader
from prepcli.restore.weights_reader import WeightsReader
from prepcli.sources.source import Source, read_config

if TYPE_CHECKING:
    from trainer.data.tokenizer import TextTokenizer
    from trainer.distributed.sharding import ShardingContext
    from trainer.generation.decode import GenerationConfig
    from trainer.generation.generator import Generator
    from trainer.nn.transformer import ModelSpec

TOKENIZER_FILE, GENERATION_CONFIG_FILE = "tokenizer.json", "generation_config.json"
DEFAULT_NEW_TOKENS = 64
STDIN = "-"
MAX_ID_DIGITS = 9  # of an id: more than any has
PROMPT_KEYS = ("prompt", "text")  # of a line that is an object
OUT_OF_MEMORY_HINT = "a smaller `--batch-size`, fewer `--max-new-tokens`, `--dtype bfloat16`, or more fsdp or mp in `--mesh`"


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Prompts as texts, as lines of a file, as texts of ids; `draws`: temperature, top-k, top-p and seed."""

    common: CommonOptions
    prompt_texts: tuple[str, ...] = ()
    prompts_file: str | None = None
    prompt_ids: tuple[str, ...] = ()
    tokenizer: Path | None = None
    max_new_tokens: int | None = None  # NEW_TOKENS, or as many as there are positions for
    sampling: tuple[float, int, float, int] = (0.0, 0, 1.0, 0)
    mesh: str | None = None
    dtype: str | None = None
    batch_size: int = 16
    verify: bool = True


@dataclass(frozen=True, slots=True)
class _EncodedPrompts:
    """Prompts as ids, with the text of each where there is a tokenizer; of an encoder's model they are its sources."""

    ids: tuple[list[int], ...]
    texts: tuple[str | None, ...]
    decoder_start_id: int | None = None  # the token that a decoder begins with which has an encoder before it

    def batch(self, start: int, stop: int) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]] | None]:
        """What a generator takes: prompts and sources."""
        own = self.ids[start:stop]
        return (own, None) if self.decoder_start_id is None else ([[self.decoder_start_id]] * len(own), own)


def generate(request: GenerateRequest, ui: Ui) -> Report:
    """What a model adds to each prompt, in their order."""
    given = (
        [*request.prompt_texts, *(_read_prompts(request.prompts_file) if request.prompts_file else ())],
        [*map(_parse_token_ids, request.prompt_ids)],
    )
    if not any(given):
        raise usage_error(
            "no prompt was given", "a model goes on from something", "`--prompt TEXT`, or `--tokens 1,2,3`"
        )
    _check_sampling(*request.sampling)
    silence_jax(ui)
    from trainer.distributed.sharding import catch_out_of_memory
    from trainer.generation.decode import GenerationConfig
    from trainer.generation.generator import check_prompts, max_fitting_new_tokens
    from trainer.generation.sampling import Sampling
    from trainer.training.setup import check_mesh_divides, model_from_manifest

    sampling = Sampling(*request.sampling)
    located, source = open_checkpoint(request.common, ui)
    check_config_option(request.common, source)
    ui.note(source_line(source))
    with catch_out_of_memory(OUT_OF_MEMORY_HINT):
        with _open_reader(request, source, located.path, ui) as reader:
            model, on = model_from_manifest(reader.manifest), _resolve_sharding(request, reader.manifest)
            check_mesh_divides(model, on)
            encoder = _load_tokenizer(request, source, bool(given[0]))
            prompts = _encode_prompts(*given, encoder, model, source.config)
            rows = prompts.batch(0, len(prompts.ids))
            fitting = min(DEFAULT_NEW_TOKENS, max_fitting_new_tokens(rows[0], model) or DEFAULT_NEW_TOKENS)
            asked = GenerationConfig(
                request.max_new_tokens or max(1, fitting), _eos_token_ids(source, model.true_vocab_size), sampling
            )
            check_prompts(*rows, model, asked)
            generator = _build_generator(request, reader, model, on, asked)
        return _generate_batches(request, generator, prompts, encoder, ui)


def _check_sampling(temperature: float, top_k: int, top_p: float, seed: int) -> None:
    """Raise a usage PrepError for options of sampling where no token is drawn."""
    if temperature == 0:
        why = "temperature 0 takes the likeliest token each time"
        check_needs("--top-k", top_k or None, "--temperature", why)
        check_needs("--top-p", top_p if top_p != 1 else None, "--temperature", why)
        check_needs("--seed", seed or None, "--temperature", why)


def _read_prompts(name: str) -> Iterator[str]:
    """The prompts of a file, a line each. PrepError where it cannot be read, or a line is not what it should be."""
    try:
        text = sys.stdin.read() if name == STDIN else Path(name).read_text("utf-8-sig")
    except OSError as error:
        raise io_error(Path(name), error) from error
    except UnicodeDecodeError as error:
        raise PrepError(f"{name} is no text", str(error), "a file of UTF-8") from error
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON may hold other separators
        if line.strip():
            yield _prompt_from_json(name, number, line) if name.endswith(".jsonl") else line


def _prompt_from_json(name: str, number: int, line: str) -> str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PrepError(f"line {number} of {name} is no JSON", str(error)) from error
    texts = [found[key] for key in PROMPT_KEYS if isinstance(found, dict) and isinstance(found.get(key), str)]
    if not texts:
        raise PrepError(f"line {number} of {name} has no prompt", f"an object with `{PROMPT_KEYS[0]}` or `{PROMPT_KEYS[1]}`, a text")
    return texts[0]


def _parse_token_ids(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and len(word) <= MAX_ID_DIGITS for word in words):
        raise usage_error(f"`--tokens {text:.60}` is not understood", "it takes ids with commas", "`--tokens 1,2,3`")
    return [int(word) for word in words]


def _open_reader(request: GenerateRequest, source: Source, path: Path, ui: Ui) -> ItemReader | WeightsReader:
    """The checkpoint to read parameters of: as prep lays it out by default, layers one after the other in a leaf, it is
    read as it is; anything else is laid out so, and its vocabulary padded for the mesh."""
    said = source.tree_manifest
    if said and said["scan"] and said["scan_axis"] == 0:
        reader = open_reader(path, request.verify)
        if request.verify and not reader.is_checked:
            check_without_checksums(source, source.tensors, ui)
        return reader
    on = _resolve_sharding(request, {"rules": said.get("rules", ())})
    axes = on.rules["vocab"][0]
    return WeightsReader(source, math.prod(map(on.mesh.size, axes)) if on.mesh else 1, request.verify)


def _resolve_sharding(request: GenerateRequest, manifest: Mapping[str, Any]) -> ShardingContext:
    """The mesh that was asked for; without one, a single device."""
    from trainer.distributed.sharding import ShardingContext, make_sharding_context
    from trainer.models.mesh import parse_mesh
    from trainer.training.setup import rules_from_manifest

    if request.mesh is None:
        return ShardingContext()
    try:
        return make_sharding_context(parse_mesh(request.mesh, "--mesh"), rules_from_manifest(manifest))
    except PrepError as error:
        hint = error.hint.replace("--set mesh=", "--mesh ")
        raise PrepError(error.what, error.why, hint, error.code) from error


def _load_tokenizer(request: GenerateRequest, source: Source, is_required: bool) -> TextTokenizer | None:
    """The tokenizer; None where there is none, and prompts are ids. PrepError where they are texts."""
    from trainer.data.tokenizer import load_tokenizer

    path, hint = request.tokenizer or _find_side_file(source, TOKENIZER_FILE), "`--tokenizer PATH`, or `--tokens 1,2,3`"
    if path is None:
        if not is_required:
            return None
        why = f"it has no {TOKENIZER_FILE}, which says what the ids of a text are"
        raise PrepError(f"{source.display_name} comes without a tokenizer", why, hint)
    try:
        return load_tokenizer(path)
    except PrepError as error:
        if not is_required and request.tokenizer is None:
            return None  # ids go without
        raise PrepError(error.what, error.why, hint) from error


def _find_side_file(source: Source, name: str) -> Path | None:
    return next((path for path in source.small_files if path.name == name), None)


def _encode_prompts(
    texts: Sequence[str],
    ids: Sequence[list[int]],
    tokenizer: TextTokenizer | None,
    model: ModelSpec,
    config: Mapping[str, Any],
) -> _EncodedPrompts:
    from trainer.training.setup import decoder_start_token_id

    encoded = [tokenizer.encode_prompt(text) for text in texts] if tokenizer else []
    said = [tokenizer.decode(each) if tokenizer else None for each in ids]
    start = decoder_start_token_id(config, model.true_vocab_size) if model.arch_config.encoder is not None else None
    return _EncodedPrompts((*encoded, *ids), (*texts, *said), start)


def _eos_token_ids(source: Source, vocab: int) -> tuple[int, ...]:
    """The tokens that end a text: one, or a list of them; what belongs to generation goes before the config."""
    path = _find_side_file(source, GENERATION_CONFIG_FILE)
    found = (read_config(path) if path else {}).get("eos_token_id", source.config.get("eos_token_id"))
    ids = (each for each in (found if isinstance(found, list) else [found]) if type(each) is int)
    return tuple(each for each in ids if 0 <= each < vocab)


def _build_generator(
    request: GenerateRequest,
    reader: ItemReader | WeightsReader,
    model: ModelSpec,
    sharding: ShardingContext,
    generation_config: GenerationConfig,
) -> Generator:
    """The parameters on their devices, in the dtype of the computation."""
    from trainer.generation.decode import inference_dtype
    from trainer.generation.generator import Generator
    from trainer.nn.transformer import ForwardConfig
    from trainer.training.checkpoint import load_params

    stored = {leaf.dtype for name, leaf in reader.leaves.items() if name.startswith("params.")}
    dtype = request.dtype or ("bfloat16" if stored == {"bfloat16"} else "float32")
    params = load_params(reader, model, sharding, lambda path: inference_dtype(path, dtype))
    return Generator(params, model, ForwardConfig(dtype, scan_layers=model.has_stacked_layers, sharding=sharding), generation_config)


def _generate_batches(
    request: GenerateRequest, generator: Generator, prompts: _EncodedPrompts, tokenizer: TextTokenizer | None, ui: Ui
) -> Report:
    count, began = len(prompts.ids), ui.clock()
    size = min(request.batch_size, count)
    made: list[list[int]] = []
    for low in range(0, count, size):
        made += generator.generate(*prompts.batch(low, low + size), low, size)
        if count > size:
            ui.note(f"{len(made):,} of {count:,} prompts done")
    seconds = ui.clock() - began - generator.compile_s
    new = sum(map(len, made))
    speed = new / max(seconds, 1e-9)
    told = f"{new:,} tokens after {count:,} prompt{'s' if count > 1 else ''} in {format_duration(seconds)}"
    ui.note(f"{told}, {speed:,.1f} tokens/s; compiled in {format_duration(generator.compile_s)}")
    texts = _decode_outputs(prompts, made, tokenizer)
    on, ends = generator.forward_config.sharding, generator.generation_config.eos_token_ids
    fields = {
        "mesh": str(on.mesh) if on.mesh else None,
        "dtype": generator.forward_config.dtype,
        "prompts": prompts.texts,
        "prompt_tokens": prompts.ids,
        "texts": texts,
        "tokens": made,
        "ended": [bool(each) and each[-1] in ends for each in made],
        "tokens_per_s": round(speed, 1),
        "compile_seconds": round(generator.compile_s, 3),
    }
    return Report("\n".join(texts or (",".join(map(str, each)) for each in made)), fields)


def _decode_outputs(prompts: _EncodedPrompts, output_ids: Sequence[Sequence[int]], tokenizer: TextTokenizer | None) -> list[str] | None:
    """What was added to each prompt; what a decoder begins with is nothing that a text goes on from."""
    if tokenizer is None:
        return None
    before = prompts.ids if prompts.decoder_start_id is None else [()] * len(output_ids)
    return [tokenizer.decode(new, old) for new, old in zip(output_ids, before)]
