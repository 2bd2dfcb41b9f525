"""`avm_gradients` and `wrap_optimizer`: the thesis's two ways in (section 5.2.1, Listings 5.3 and 5.4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from graph_passes.errors import GraphError, NoGradientError
from tfmem.api import make_engine
from tfmem.config import Budget, Options, merged
from tfmem.live import optimize_live


def avm_gradients(
    loss: tf.Tensor,
    variables: Sequence[Any],
    *,
    memory_budget: Budget = None,
    policy: str | None = None,
    options: Options | None = None,
    **gradients: Any,
) -> list[Any]:
    """`tf.gradients`, in a step that runs within a memory budget (thesis, Listing 5.3).

    Works in a `tf.Graph` and inside a `tf.function`.

    Args:
        loss: the loss, a tensor of the graph being built.
        variables: what to differentiate by.
        memory_budget, policy, options: as in `tfmem.optimize`.
        **gradients: passed to `tf.gradients`.

    Returns:
        What `tf.gradients` returns: a gradient for each variable, None where the loss does not depend on it.

    Raises:
        GraphError: called eagerly.
        NoGradientError: the loss depends on none of the variables.
        BudgetError: see `tfmem.optimize`.
    """
    if tf.executing_eagerly():
        raise GraphError("avm_gradients needs a graph: call it inside a tf.function or under tf.Graph().as_default()")
    engine = make_engine(merged(options, memory_budget, policy))
    found = tf.gradients(loss, variables, **gradients)
    if all(gradient is None for gradient in found):
        names = ", ".join(str(getattr(variable, "name", variable)) for variable in list(variables)[:5])
        raise NoGradientError(f"'{loss.name}' depends on none of the {len(list(variables))} variables ({names}, ...)")
    kept = [gradient.name for gradient in found if isinstance(gradient, tf.Tensor)]
    optimize_live(loss.graph, engine, loss, kept)
    return list(found)


def wrap_optimizer(
    optimizer: Any,
    *,
    memory_budget: Budget = None,
    policy: str | None = None,
    options: Options | None = None,
) -> Any:
    """An optimizer of the same class that puts the step it is used in under a memory budget (thesis, Listing 5.4).

    Args:
        optimizer: of Keras 3, `tf_keras`, or `tf.compat.v1.train`. It is not changed; the result shares its state.
        memory_budget, policy, options: as in `tfmem.optimize`.

    Raises:
        GraphError: the object is no such optimizer.
    """
    engine_options = merged(options, memory_budget, policy)
    for method in ("apply_gradients", "apply"):
        if callable(getattr(optimizer, method, None)):
            break
    else:
        raise GraphError(
            f"cannot wrap a {type(optimizer).__name__}; expected an optimizer of Keras 3, tf_keras or tf.compat.v1"
        )

    class Wrapped(type(optimizer)):  # type: ignore[misc]
        """The user's optimizer; before it applies gradients, the graph that made them is optimised."""

        def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            pairs = list(grads_and_vars)
            gradients = [gradient for gradient, _ in pairs if isinstance(gradient, tf.Tensor)]
            symbolic = [gradient for gradient in gradients if not hasattr(gradient, "numpy")]
            if symbolic:
                names = [gradient.name for gradient in symbolic]
                optimize_live(symbolic[0].graph, make_engine(engine_options), None, names)
            return super().apply_gradients(pairs, *args, **kwargs)

    Wrapped.__name__ = type(optimizer).__name__
    Wrapped.__qualname__ = type(optimizer).__qualname__
    wrapped = object.__new__(Wrapped)
    wrapped.__dict__ = optimizer.__dict__
    return wrapped
