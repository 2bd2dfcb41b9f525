"""Rewrites the functions of a SavedModel directory into another one.

Relies on `_list_all_concrete_functions` of a loaded `tf.function`: no public API lists its traces.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction

from graph_passes.errors import GraphError
from tfmem.capture.original_gradient import can_run_again, differentiable

Replace = Callable[[ConcreteFunction], ConcreteFunction]


class FunctionRewriter(Protocol):
    """Gives the replacement of a function that users call `name`, or the function itself."""

    def __call__(self, concrete: ConcreteFunction, /, *, name: str) -> ConcreteFunction: ...


def optimize_saved_model(
    path: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    rewrite: FunctionRewriter,
    before_saving: Callable[[], None] = lambda: None,
) -> str:
    """Load a SavedModel, rewrite its signatures and the functions of its root object, and save it.

    Variables, assets and the names of signatures, inputs and outputs are kept. Functions of objects
    further down are written as they are. The result is loaded with `tf.saved_model.load` after the
    op library.

    Args:
        path: a SavedModel of TensorFlow 2.
        output_path: where to write; must not exist, or be empty.
        rewrite: gives a function's replacement, or the function itself; `name` is what users call it.
        before_saving: called when all are rewritten; nothing is written if it raises.

    Returns:
        `output_path`.

    Raises:
        GraphError: `path` is no SavedModel, holds nothing to rewrite, or `output_path` is taken.
    """
    source, target = Path(path), Path(output_path)
    if not (source / "saved_model.pb").is_file():
        raise GraphError(f"'{source}' is not a SavedModel, it has no saved_model.pb; pass the directory with it")
    if target.is_dir() and any(target.iterdir()):
        raise GraphError(f"'{target}' is not empty; name a directory to be made")
    model = tf.saved_model.load(str(source))
    functions = {name: value for name, value in vars(model).items() if _is_traced(value)}
    if not model.signatures and not functions:
        raise GraphError(
            f"the SavedModel in '{source}' has no signature and no function to rewrite; save it with signatures"
        )
    signatures = {
        name: _rewrite_signature(function, partial(rewrite, name=name)) for name, function in model.signatures.items()
    }
    for name, function in functions.items():
        setattr(model, name, _rewrite_function(function, partial(rewrite, name=name)))
    before_saving()
    tf.saved_model.save(model, str(target), signatures=signatures)
    return os.fspath(output_path)


def _is_traced(value: object) -> bool:
    return isinstance(value, polymorphic_function.Function) and bool(_traces(value))


def _traces(function: Any) -> list[ConcreteFunction]:
    traces: list[ConcreteFunction] = function._list_all_concrete_functions()
    return traces


def _rewrite_signature(
    signature: ConcreteFunction, rewrite: Callable[[ConcreteFunction], ConcreteFunction]
) -> ConcreteFunction:
    rewritten = rewrite(signature)
    called = _with_gradient(signature, rewritten)
    if called is rewritten:
        return rewritten
    _, keywords = signature.structured_input_signature
    traced: ConcreteFunction = tf.function(called, autograph=False).get_concrete_function(**keywords)
    return traced


def _with_gradient(old: ConcreteFunction, new: ConcreteFunction) -> Callable[..., Any]:
    """`new`; with the gradient of `old`, if that can be run for it."""
    return new if new is old or not can_run_again(old) else differentiable(old, new)


def _rewrite_function(function: Any, rewrite: Replace) -> Any:
    """A `tf.function` with the same traces, each of which calls the rewritten one."""
    traces = [(trace, _with_gradient(trace, rewrite(trace))) for trace in _traces(function)]
    if all(old is new for old, new in traces):
        return function

    def called(*args: Any, **kwargs: Any) -> Any:
        # Saving may trace again, so this finds the trace by its arguments.
        callee = next(new for old, new in traces if _takes(old, args, kwargs))
        return callee(*args, **kwargs)

    spec = function.function_spec
    called.__signature__ = _signature(spec)  # type: ignore[attr-defined]  # users call it by these names
    rewritten = tf.function(called, input_signature=spec.input_signature, autograph=False)
    if spec.input_signature is not None:
        rewritten.get_concrete_function()
        return rewritten
    for old, _ in traces:
        args, kwargs = old.structured_input_signature
        rewritten.get_concrete_function(*args, **kwargs)
    return rewritten


def _signature(spec: Any) -> inspect.Signature:
    """The names of a function's parameters, and their defaults, as `tf.function` keeps them."""
    parameters = [
        inspect.Parameter(each.name, each.kind, default=spec.default_values.get(each.name, inspect.Parameter.empty))
        for each in spec.function_type.parameters.values()
    ]
    return inspect.Signature(parameters)


def _takes(trace: ConcreteFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `trace` was made for such arguments: equal values, and tensors of its specs."""
    wanted, given = trace.structured_input_signature, (args, kwargs)
    try:
        tf.nest.assert_same_structure(wanted, given, expand_composites=True)
    except (TypeError, ValueError):
        return False
    pairs = zip(*(tf.nest.flatten(each, expand_composites=True) for each in (wanted, given)), strict=True)
    return all(
        tf.is_tensor(value) and spec.dtype == value.dtype and spec.shape.is_compatible_with(value.shape)
        if isinstance(spec, tf.TensorSpec)
        else spec == value
        for spec, value in pairs
    )
