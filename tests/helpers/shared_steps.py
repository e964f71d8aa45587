"""Compiled steps of training and generation that equal runs of a test process share.

Most tests of commands use one tiny model, and tracing and lowering its steps takes longer than the steps. These tests
must not replace functions that are traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import pytest

from trainer.distributed.compilation import CompiledFunction
from trainer.generation import generator
from trainer.nn.model_spec import ForwardConfig
from trainer.training import evaluation, loop
from trainer.training.evaluation import jit_eval_step, jit_row_eval_step
from trainer.training.step import StepSetup, jit_train_step

PLAIN = ForwardConfig()


def to_comparable(argument: Any) -> Any:
    """Return an argument in a form that compares by value: a sharding context is replaced by its fields."""
    if isinstance(argument, StepSetup):
        return replace(argument, forward_config=PLAIN), to_comparable(argument.forward_config)
    if isinstance(argument, ForwardConfig):
        sharding = argument.sharding
        plain = replace(argument, sharding=PLAIN.sharding)
        return plain, sharding.mesh, sharding.rules, sharding.device_mesh
    if isinstance(argument, dict):
        return {key: to_comparable(value) for key, value in argument.items()}
    return argument


class SharedResults:
    """The results of a function, by arguments that can be compared but not hashed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._results = function, list[tuple[list[Any], Any]]()

    def __call__(self, *arguments: Any) -> Any:
        """Return the result of an earlier call with equal arguments, else call the function."""
        compared = [to_comparable(argument) for argument in arguments]
        for earlier, result in self._results:
            if earlier == compared:
                return result
        self._results.append((compared, self._function(*arguments)))
        return self._results[-1][1]


class SharedStep:
    """A jitted training step that is compiled once for each shape of its arguments."""

    def __init__(self, setup: StepSetup) -> None:
        self._jitted = jit_train_step(setup)
        self._compile = SharedResults(
            lambda treedef, shapes: self._lower(treedef, shapes).compile()
        )

    def lower(self, *shapes: Any) -> _LoweredStep:
        """Return an object whose `compile` method compiles the step for these shapes, as that of a jitted step does."""
        leaves, treedef = jax.tree.flatten(shapes)
        return _LoweredStep(lambda: self._compile(treedef, leaves))

    def _lower(self, treedef: Any, leaves: list[Any]) -> Any:
        return self._jitted.lower(*jax.tree.unflatten(treedef, leaves))


class _LoweredStep:
    def __init__(self, compile: Callable[[], Any]) -> None:
        self.compile = compile


class SharedFunction(CompiledFunction):
    """A compiled function of a generator. Equal generators share its executables, and each counts its own seconds."""

    def __init__(self, function: partial[Any], **options: Any) -> None:
        shared = FUNCTIONS(function.func, function.keywords, options)
        self._jitted, self._executables, self.compile_s = shared._jitted, shared._executables, 0.0


def _compile_function(
    function: Callable[..., Any], keywords: Any, options: Any
) -> CompiledFunction:
    return CompiledFunction(jax.jit(partial(function, **keywords), **options))


TRAIN_STEPS = SharedResults(SharedStep)
EVAL_STEPS, ROW_EVAL_STEPS = SharedResults(jit_eval_step), SharedResults(jit_row_eval_step)
FUNCTIONS = SharedResults(_compile_function)


@contextmanager
def share_steps() -> Iterator[None]:
    """Let all runs of this process with equal setups use the same compiled steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "jit_train_step", TRAIN_STEPS)
        for module in (loop, evaluation):
            patch.setattr(module, "jit_eval_step", EVAL_STEPS)
        patch.setattr(evaluation, "jit_row_eval_step", ROW_EVAL_STEPS)
        patch.setattr(generator, "_jit_function", SharedFunction)
        yield
