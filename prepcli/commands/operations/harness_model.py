"""Run the tasks of the LM Evaluation Harness (lm-eval) on any checkpoint. The functions import jax.

import lm_eval
import prepcli as prep

with prep.harness_model("gpt-neo-1.3B-init") as model:
    lm_eval.simple_evaluate(model=model, tasks=["lambada_openai"])
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, Unpack

from prepcli.commands.console.stdio import prepare_jax
from prepcli.commands.operations.checkpoint_options import common_options, open_checkpoint
from prepcli.commands.operations.computing import (
    open_params,
    resolve_compute_dtype,
    source_generation_defaults,
    tokenizer_path,
)
from prepcli.commands.operations.operation import public, rendered_for_python
from prepcli.commands.operations.options import SourceOptions
from prepcli.core.errors import PrepError, usage_error
from prepcli.core.observer import SilentObserver
from prepcli.core.option_spec import PathLike, PositiveInt, as_tuple
from prepcli.sources.generation_config import GenerationDefaults, TokenRules
from trainer.run.params import OpenedModel

if TYPE_CHECKING:
    from prepcli.models.param_tree import Tree
    from trainer.data.tokenizer import TextTokenizer
    from trainer.generation.decode import GenerationConfig
    from trainer.generation.generator import Generator
    from trainer.nn.model_spec import ForwardConfig
    from trainer.training.evaluation import EvalStep, Score, ScoreRequest

DEFAULT_LENGTH = 2048  # for models without a limit of positions in their config
DEFAULT_NEW_TOKENS = 256


class HarnessOptions(TypedDict, total=False):
    """Options of a text in a request of lm-evaluation-harness."""

    until: str | Sequence[str]
    max_gen_toks: int
    temperature: float | None
    do_sample: bool
    top_k: int | None
    top_p: float | None


class Instance(Protocol):
    """A request of the harness."""

    @property
    def args(self) -> tuple[Any, ...]:
        """Arguments of the request."""
        ...


@dataclass(frozen=True, slots=True)
class HarnessMethods:
    """The three methods of the harness's `LM`, on a model with a tokenizer.

    Attributes:
        params: Parameters on their devices.
        opened: The model and its mesh.
        forward_config: Execution options.
        eval_step: Computes the loss of each row.
        tokenizer: The model's tokenizer.
        eos_ids: Tokens that end a text.
        rules: Rules of the model that change which token is chosen.
        stop_texts: Texts of the model that end a text, as those of a request do.
        prefix_id: Token that precedes a text without context.
        batch_size: Rows per batch.
        max_length: Maximum tokens of a row.
        generators: Generators that were compiled, by their options.
    """

    params: Tree
    opened: OpenedModel
    forward_config: ForwardConfig
    eval_step: EvalStep
    tokenizer: TextTokenizer
    eos_ids: tuple[int, ...]
    rules: TokenRules
    stop_texts: tuple[str, ...]
    prefix_id: int
    batch_size: int
    max_length: int
    generators: dict[GenerationConfig, Generator] = field(default_factory=dict)

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Return the log likelihood of each continuation, and whether greedy generation gives it."""
        scores = self._score_requests(
            [self._continuation_request(*request.args) for request in requests]
        )
        return [(score.log_likelihood, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Return the log likelihood of each text. Each token is predicted once."""
        from trainer.training.evaluation import rolling_requests

        # A text longer than the model is scored in windows. All windows are scored in the same batches.
        windows: list[ScoreRequest] = []
        counts: list[int] = []
        for request in requests:
            ids = self.tokenizer.encode_prompt(request.args[0])
            text_windows = list(rolling_requests(ids, self.prefix_id, self.max_length))
            windows += text_windows
            counts.append(len(text_windows))
        scores = iter(self._score_requests(windows))
        return [sum(score.log_likelihood for score in islice(scores, n)) for n in counts]

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Return the continuation of each context, up to the first stop text.

        Args:
            requests: Their arguments are a context and options: `until`, `max_gen_toks`, `temperature`, `do_sample`,
                `top_k`, `top_p`.
        """
        configs = [self._generation_config(request.args[1]) for request in requests]
        texts: dict[int, str] = {}
        # Each set of options compiles one generator. The texts return to the order of the requests at the end.
        for config in dict.fromkeys(configs):
            numbers = [number for number, other in enumerate(configs) if other == config]
            for start in range(0, len(numbers), self.batch_size):
                batch = numbers[start : start + self.batch_size]
                outputs = self._generate_texts(
                    [requests[number] for number in batch], config, first_row=start
                )
                texts |= dict(zip(batch, outputs, strict=True))
        return [texts[number] for number in range(len(requests))]

    def _continuation_request(self, context: str, continuation: str) -> ScoreRequest:
        """Return the request of a continuation.

        Spaces at the end of the context belong to the continuation.
        """
        from trainer.training.evaluation import ScoreRequest

        # Tokens such as " cat" begin with the space. The context "the " would end with a lone space token, which texts
        # of training rarely have.
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        if stripped:
            # Tokens may span the border, so the whole text is encoded at once.
            prefix = self.tokenizer.encode_prompt(stripped)
            whole = self.tokenizer.encode_prompt(stripped + continuation)
        else:
            prefix = [self.prefix_id]
            whole = self.tokenizer.encode([continuation])[0].tolist()
            if whole[:1] != prefix:
                whole = prefix + whole
        # A row of L inputs predicts L targets: tokens 0..L-1 predict tokens 1..L. The last L + 1 tokens are kept, and
        # at most L of them are scored.
        num_scored = min(len(whole) - len(prefix), self.max_length)
        if num_scored < 1:
            raise usage_error(
                "a continuation has no tokens",
                f"it is {continuation!r:.60}",
                "use a text that is not empty",
            )
        return ScoreRequest(whole[-(self.max_length + 1) :], num_scored)

    def _score_requests(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        from trainer.training.evaluation import score_sequences

        return score_sequences(
            self.params,
            requests,
            eval_step=self.eval_step,
            sharding=self.opened.sharding,
            batch_size=self.batch_size,
            max_length=self.max_length,
        )

    def _generation_config(self, options: HarnessOptions) -> GenerationConfig:
        from trainer.generation.decode import GenerationConfig
        from trainer.generation.sampling import Sampling

        # At least one position stays for the context.
        max_new_tokens = min(
            int(options.get("max_gen_toks", DEFAULT_NEW_TOKENS)), self.max_length - 1
        )
        sampling = Sampling(*_sampling_options(options))
        return GenerationConfig(max_new_tokens, self.eos_ids, sampling, self.rules)

    def _generate_texts(
        self, requests: Sequence[Instance], config: GenerationConfig, *, first_row: int
    ) -> list[str]:
        """Return the texts generated for a batch of contexts, each cut at its first stop text."""
        from trainer.generation.generator import Generator

        if config not in self.generators:
            self.generators[config] = Generator(
                self.params,
                self.opened.model,
                forward_config=self.forward_config,
                generation_config=config,
            )
        max_context = self.max_length - config.max_new_tokens
        prompts = [
            (self.tokenizer.encode_prompt(request.args[0]) or [self.prefix_id])[-max_context:]
            for request in requests
        ]
        outputs = self.generators[config].generate(
            prompts, first_row=first_row, min_rows=self.batch_size
        )
        return [
            _cut_at_stop_text(
                self.tokenizer.decode(ids, prompt),
                (*as_tuple(request.args[1].get("until") or ()), *self.stop_texts),
            )
            for ids, prompt, request in zip(outputs, prompts, requests, strict=True)
        ]


def _cut_at_stop_text(text: str, stop_texts: Sequence[str]) -> str:
    """Return the text before the first stop text."""
    end = len(text)
    for stop in stop_texts:
        position = text.find(stop)
        if stop and position >= 0:
            end = min(end, position)
    return text[:end]


def _sampling_options(options: HarnessOptions) -> tuple[float, int, float]:
    """Return temperature, top-k and top-p. The default is greedy decoding."""
    temperature = float(options.get("temperature") or 0.0)
    if not options.get("do_sample", temperature > 0) or temperature == 0:
        return 0.0, 0, 1.0
    return temperature, int(options.get("top_k") or 0), float(options.get("top_p") or 1.0)


@public
@contextmanager
def harness_model(
    checkpoint: PathLike,
    *,
    mesh: str | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    reduction: Literal["fast", "exact"] = "exact",
    batch_size: PositiveInt = 8,
    max_length: PositiveInt | None = None,
    tokenizer: PathLike | None = None,
    verify: bool = True,
    ema: bool = False,
    **options: Unpack[SourceOptions],
) -> Iterator[Any]:
    """Open a checkpoint as a model of the LM Evaluation Harness.

    By default log likelihoods do not depend on the batch size or the mesh, and each device holds all parameters while
    it computes them.

    A warning names the rules of the model's generation_config.json, and its fields that are not supported.

    Args:
        checkpoint: Folder, alias, hub id, URL, training run, or a step of one. It must be a decoder-only model.
        mesh: `dp,fsdp,mp` sizes or named axes. None: the first device.
        dtype: "float32" or "bfloat16". Default: bfloat16 if all weights are bfloat16, otherwise float32.
        reduction: "exact" computes each row alone, with all parameters on its device. "fast" leaves the parameters
            split by the mesh, as for a model that is larger than a device. Results then differ by rounding.
        batch_size: Rows per batch.
        max_length: Maximum tokens of a row. Default: the positions of the model, at most 2048.
        tokenizer: A tokenizer, as a file or folder. Default: the checkpoint's.
        verify: Compare the weights with the checkpoint's checksums or digests.
        ema: Take the moving average of a run's parameters.
        **options: See `SourceOptions`.

    Yields:
        An instance of a subclass of `lm_eval.api.model.LM`.

    Raises:
        UsageError: An argument is invalid, or the model has an encoder or no end token.
        PrepError: lm-eval is not installed, or the checkpoint or the devices cannot be used.
    """
    observer = SilentObserver()
    with ExitStack() as stack:
        stack.enter_context(rendered_for_python())
        base = _harness_base()
        prepare_jax(observer)
        # The backend reads the settings of exact sums when it starts, so nothing may use a device before this.
        if reduction == "exact":
            from trainer.distributed.exact_reduction import start_exact_backend

            start_exact_backend()
        common = common_options(checkpoint, None, {**options, "ema": ema})
        located, source = open_checkpoint(common, observer)
        opened = stack.enter_context(
            open_params(located, source, mesh, verify=verify, observer=observer)
        )
        path = tokenizer_path(source, tokenizer, purpose="encode texts")
        vocab = opened.model.true_vocab_size
        defaults = source_generation_defaults(source, vocab, note=warnings.warn)
        _check_model(opened, defaults.eos_token_ids)
        methods = _load_harness_methods(
            opened,
            path,
            dtype=dtype,
            reduction=reduction,
            defaults=defaults,
            batch_size=batch_size,
            max_length=max_length or DEFAULT_LENGTH,
        )
        yield _make_harness_model(base, methods)


def _harness_base() -> type[Any]:
    """Return the harness's class of models. Raise PrepError if it is not installed."""
    try:
        return import_module("lm_eval.api.model").LM
    except ImportError as error:
        why = "it is not installed"
        hint = "`pip install 'prepcli[lm-eval]'`"
        raise PrepError("the LM Evaluation Harness needs lm-eval", why, hint) from error


def _make_harness_model(base: type[Any], methods: HarnessMethods) -> Any:
    """Return an instance of a subclass of the harness's class with the methods."""
    names = ("loglikelihood", "loglikelihood_rolling", "generate_until")

    def method(name: str) -> Any:
        return lambda self, requests, *_, **__: getattr(methods, name)(requests)

    return type("PrepLM", (base,), {name: method(name) for name in names})()


def _check_model(opened: OpenedModel, eos_ids: Sequence[int]) -> None:
    name = opened.model.family.name
    if opened.model.arch_config.encoder is not None:
        raise usage_error(
            f"{name} has an encoder",
            "the harness is supported for decoder-only models",
            "`prep.evaluate`",
        )
    if not eos_ids:
        raise usage_error(
            f"config.json of {name} has no eos_token_id",
            "a generated text ends with it",
            "add it, or use an export of the model that has one",
        )


def _load_harness_methods(
    opened: OpenedModel,
    tokenizer_file: Path,
    *,
    dtype: str | None,
    reduction: Literal["fast", "exact"],
    defaults: GenerationDefaults,
    batch_size: int,
    max_length: int,
) -> HarnessMethods:
    """Load the parameters and the tokenizer, and prepare the evaluation step."""
    from trainer.data.tokenizer import load_tokenizer
    from trainer.distributed.compilation import CompiledFunction
    from trainer.generation.decode import inference_dtype
    from trainer.nn.model_spec import ForwardConfig
    from trainer.training.evaluation import jit_fast_row_eval_step, jit_row_eval_step

    model = opened.model
    sharding = opened.sharding
    text_tokenizer = load_tokenizer(tokenizer_file)
    dtype = resolve_compute_dtype(dtype, opened)
    forward_config = ForwardConfig(dtype, scan_layers=model.has_stacked_layers, sharding=sharding)
    jit_step = jit_row_eval_step if reduction == "exact" else jit_fast_row_eval_step
    num_replicas = sharding.data_parallel_size
    return HarnessMethods(
        params=opened.load(lambda path: inference_dtype(path, dtype)),
        opened=opened,
        forward_config=forward_config,
        eval_step=CompiledFunction(jit_step(model, forward_config)),
        tokenizer=text_tokenizer,
        eos_ids=defaults.eos_token_ids,
        rules=defaults.rules,
        stop_texts=defaults.stop_texts,
        prefix_id=_prefix_id(text_tokenizer, defaults.eos_token_ids[0]),
        # Each replica computes equally many rows: 8 rows on 3 replicas become 9.
        batch_size=-(-batch_size // num_replicas) * num_replicas,
        max_length=min(max_length, model.arch_config.max_positions),
    )


def _prefix_id(tokenizer: TextTokenizer, eos_id: int) -> int:
    """Return the token before a text without context: the tokenizer's `bos_token`, or `eos_id` without one."""
    from trainer.data.chat_template import load_special_tokens

    bos_token = dict(load_special_tokens(tokenizer.path)).get("bos_token")
    if bos_token is None:
        return eos_id
    bos_id = tokenizer.codec.token_id(bos_token)
    return eos_id if bos_id is None else bos_id
