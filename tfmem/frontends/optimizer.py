"""`avm_gradients` and `wrap_optimizer`, the two interfaces of the AutoVM thesis (section 5.2.1, Listings 5.3, 5.4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from graph_passes import checks
from graph_passes.errors import GraphError, NoGradientError
from graph_passes.report import Report
from tfmem.api import make_engine
from tfmem.budgets import Budgets
from tfmem.frontends.live_graph import REPORT, optimize_live
from tfmem.options import Options, merged


@tf.autograph.experimental.do_not_convert
def avm_gradients(
    loss: tf.Tensor,
    variables: Sequence[Any],
    *,
    memory_budget: Budgets = None,
    policy: str | None = None,
    options: Options | None = None,
    **gradients: Any,
) -> list[Any]:
    """`tf.gradients`, in a step that runs within a memory budget (thesis, Listing 5.3).

    Works in a `tf.Graph` and inside a `tf.function`.

    Args:
        loss: the loss, a tensor of the graph being built.
        variables: one variable or tensor, or several, by which the loss is differentiated.
        memory_budget, policy, options: as in `tfmem.optimize`.
        **gradients: passed to `tf.gradients`.

    Returns:
        What `tf.gradients` returns: a gradient for each variable, None where the loss does not depend on it.

    Raises:
        GraphError: called eagerly.
        OptionsError: an argument is of the wrong type.
        NoGradientError: the loss depends on none of the variables.
        BudgetError: see `tfmem.optimize`.
    """
    if tf.executing_eagerly():
        raise GraphError("avm_gradients needs a graph: call it inside a tf.function or under tf.Graph().as_default()")
    if not isinstance(loss, tf.Tensor) or hasattr(loss, "numpy"):
        checks.refuse("loss", loss, "a tensor of the graph that is being built")
    variables = [variables] if hasattr(variables, "dtype") else checks.series("variables", variables, "a list of them")
    for variable in variables:
        if not (hasattr(variable, "dtype") and hasattr(variable, "shape")):
            checks.refuse("variables", variable, "variables or tensors of the graph")
    engine = make_engine(merged(options, memory_budget, policy))
    if any(getattr(variable, "dtype", tf.float32)._is_ref_dtype for variable in variables):  # noqa: SLF001
        gradients.setdefault("gate_gradients", True)  # an update must not change what its layer's other gradient reads
    found = tf.gradients(loss, variables, **gradients)
    if all(gradient is None for gradient in found):
        names = ", ".join(str(getattr(variable, "name", variable)) for variable in list(variables)[:5])
        raise NoGradientError(
            f"'{loss.name}' depends on none of the {len(list(variables))} variables ({names}, ...); "
            "pass variables that the loss reads"
        )
    optimize_live(loss.graph, engine, loss, [tensor.name for tensor in _tensors(found)])
    return list(found)


def wrap_optimizer(
    optimizer: Any,
    *,
    memory_budget: Budgets = None,
    policy: str | None = None,
    options: Options | None = None,
) -> Any:
    """An optimizer of the same class, which keeps its step within a memory budget (thesis, Listing 5.4).

    Args:
        optimizer: of Keras 3, `tf_keras`, or `tf.compat.v1.train`. It is not changed; the result shares its state.
        memory_budget, policy, options: as in `tfmem.optimize`.

    Returns:
        The optimizer. `tfmem.report` of it says what was done to the step that used it; of several steps, to the one
        that needs the most memory.

    Raises:
        GraphError: the object is not such an optimizer; or, when it is used, the step is not in a graph.
    """
    engine_options = merged(options, memory_budget, policy)
    methods = [name for name in ("apply", "apply_gradients") if callable(getattr(optimizer, name, None))]
    if not methods:
        raise GraphError(
            f"cannot wrap a {type(optimizer).__name__}; expected an optimizer of Keras 3, tf_keras or tf.compat.v1"
        )

    class Wrapped(type(optimizer)):  # type: ignore[misc]
        """The user's optimizer; before it applies gradients, the graph that made them is optimised."""

    reports: list[Report] = []

    def note(found: Report | None) -> None:
        if found is not None:
            reports.append(found)
            # The class holds the report, since the optimizer's attributes are those of the given optimizer.
            setattr(Wrapped, REPORT, max(reports, key=lambda report: report.peak_before))

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        note(_optimize_for([gradient for gradient, _ in pairs], engine_options))
        return super(Wrapped, self).apply_gradients(pairs, *args, **kwargs)

    @tf.autograph.experimental.do_not_convert
    def apply(self: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = list(grads)
        note(_optimize_for(gradients, engine_options))
        return super(Wrapped, self).apply(gradients, *args, **kwargs)

    # Keras 3's apply_gradients calls apply, which a custom loop may call by itself.
    setattr(Wrapped, methods[0], apply if methods[0] == "apply" else apply_gradients)
    for name in ("__module__", "__name__", "__qualname__"):
        setattr(Wrapped, name, getattr(type(optimizer), name))
    wrapped = object.__new__(Wrapped)
    object.__setattr__(wrapped, "__dict__", optimizer.__dict__)  # an optimizer's own __setattr__ would track it
    return wrapped


def _optimize_for(gradients: Sequence[Any], options: Options) -> Report | None:
    """Optimise the graph that makes these gradients; None if there are none."""
    tensors = _tensors(gradients)
    if any(hasattr(tensor, "numpy") for tensor in tensors):
        raise GraphError("the gradients are eager, so there is no graph to optimise; put the step into a tf.function")
    if not tensors:
        return None
    return optimize_live(tensors[0].graph, make_engine(options), None, [tensor.name for tensor in tensors])


def _tensors(gradients: Sequence[Any]) -> list[Any]:
    """What MemOps see of gradients: of sparse ones their values, of missing ones nothing."""
    values = [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient for gradient in gradients]
    return [value for value in values if isinstance(value, tf.Tensor)]
