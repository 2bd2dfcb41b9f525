"""TfmemDynamic and TfmemDynamicStep in TensorFlow: calls, and the gradient, which is the same op in another mode."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from custom_ops.dynamic.codegen.program import DynamicProgram
from custom_ops.dynamic.spec import Spec
from custom_ops.errors import DynamicError, GradientError
from custom_ops.image_functions import named
from custom_ops.text_lines import decoded

if TYPE_CHECKING:
    from types import ModuleType

    import tensorflow as tf

OP = "TfmemDynamic"


def forward_backward(
    ops: ModuleType,
    spec: Spec,
    parameters: Sequence[Any],
    batch: Any,
    seed: Any,
    loss_weights: tf.Tensor | None,
    program: DynamicProgram | None = None,
) -> tuple[tf.Tensor, tuple[tf.Tensor, ...], tuple[Any, ...]]:
    """Losses, outputs, and for each parameter its gradient.

    Args:
        ops: of the op library.
        spec: the kinds.
        parameters: tensors or variables, in the order of the spec.
        batch: kinds, children and arguments as ragged int32 tensors.
        seed: of random numbers.
        loss_weights: `[examples]`; none: 1.
        program: for a GPU; none: the op runs on the CPU.
    """
    dense, sparse = _counts(spec)
    given = [] if loss_weights is None else [loss_weights]
    found = _call(
        ops, spec, program, parameters, batch, seed, "forward_backward", loss_gradients=given, Nd=dense, Nr=sparse
    )
    return found.losses, tuple(found.outputs), _gradients(spec, found)


def forward(
    ops: ModuleType,
    spec: Spec,
    parameters: Sequence[Any],
    batch: Any,
    seed: Any,
    *,
    state_of: int,
    training: bool,
    program: DynamicProgram | None = None,
) -> tuple[tf.Tensor, tuple[tf.Tensor, ...], tuple[tf.Tensor, ...]]:
    """Losses, outputs, and states of the nodes that have a state as those of kind `state_of` have (-1: none).

    In training, TensorFlow may differentiate losses and states; to ask for a gradient of outputs is an error.
    """
    state_type = -1 if state_of < 0 else spec.types.index(spec.kinds[state_of].state)
    states = 0 if state_type < 0 else len(spec.types[state_type])
    mode = "training" if training else "forward"
    found = _call(ops, spec, program, parameters, batch, seed, mode, state_type=state_type, Ns=states)
    outputs = tuple(map(ops.tfmem_dynamic_output, found.outputs)) if training else tuple(found.outputs)
    return found.losses, outputs, tuple(found.states)


def step(
    ops: ModuleType,
    spec: Spec,
    variables: Sequence[tf.Variable],
    batch: Any,
    seed: Any,
    loss_weights: tf.Tensor | None,
    rule: str,
    rates: tf.Tensor,
    number: Any,
    program: DynamicProgram | None = None,
) -> tuple[tf.Tensor, tuple[tf.Tensor, ...], tf.Tensor]:
    """Losses, outputs, and `number` again once the batch was checked.

    `number` is in host memory, so counting a step waits for no GPU. The op updates parameters and slots, in that order.
    """
    import tensorflow as tf

    found = ops.tfmem_dynamic_step(
        variables=[variable.handle for variable in variables],
        **_integers(batch),
        seed=seed_of(seed),
        loss_gradients=[] if loss_weights is None else [loss_weights],
        rates=rates,
        number=tf.cast(number, tf.int64),
        No=_outputs(spec),
        spec=spec.text,
        N=len(spec.parameters),
        rule=rule,
        **_programs(program),
    )
    return found.losses, tuple(found.outputs), found.done


def register_gradient(ops: ModuleType) -> None:
    """Tells TensorFlow the op's gradient; once, when the op library is loaded."""
    import tensorflow as tf

    tf.RegisterGradient(OP)(functools.partial(_gradient, ops))
    tf.RegisterGradient("TfmemDynamicOutput")(_no_gradient)
    tf.no_gradient("TfmemDynamicStep")


def seed_of(given: Any) -> tf.Tensor:
    """A seed as the op takes it.

    Raises:
        DynamicError: it is no integer.
    """
    import tensorflow as tf

    if isinstance(given, int) and not isinstance(given, bool):
        return tf.constant(given, tf.int64)
    try:
        seed = tf.convert_to_tensor(given)
    except (TypeError, ValueError):
        seed = None
    if seed is None or not seed.dtype.is_integer:
        raise DynamicError(f"seed {given!r}; expected an integer")
    return tf.cast(seed, tf.int64)


def _counts(spec: Spec) -> tuple[int, int]:
    return len(spec.sparse) - sum(spec.sparse), sum(spec.sparse)


def _outputs(spec: Spec) -> int:
    return max((len(kind.outputs) for kind in spec.kinds), default=0)


def _integers(batch: Any) -> dict[str, tf.Tensor]:
    import tensorflow as tf

    names = (("kinds", "kind_splits"), ("children", "child_splits"), ("arguments", "argument_splits"))
    found = {}
    for (values, splits), ragged in zip(names, batch, strict=True):
        found[values] = ragged.values
        found[splits] = (
            ragged.row_splits if ragged.row_splits.dtype == tf.int64 else tf.cast(ragged.row_splits, tf.int64)
        )
    return found


def _programs(program: DynamicProgram | None) -> dict[str, list[str]]:
    if program is None:
        return {"programs": [], "images": []}
    return {"programs": [program.to_text()], "images": named([program.image.code])}


def _call(
    ops: ModuleType,
    spec: Spec,
    program: DynamicProgram | None,
    parameters: Sequence[Any],
    batch: Any,
    seed: Any,
    mode: str,
    **other: Any,
) -> Any:
    import tensorflow as tf

    lists = {name: other.pop(name, []) for name in ("kept", "loss_gradients", "state_gradients")}
    counts = {name: other.pop(name, 0) for name in ("Ns", "Nd", "Nr")}
    return ops.tfmem_dynamic(
        parameters=[tf.convert_to_tensor(parameter) for parameter in parameters],
        **_integers(batch),
        seed=seed_of(seed),
        **lists,
        **counts,
        No=_outputs(spec),
        spec=spec.text,
        mode=mode,
        **_programs(program),
        **other,
    )


def _gradients(spec: Spec, found: Any) -> tuple[Any, ...]:
    import tensorflow as tf

    dense, rows, of_rows = iter(found.gradients), iter(found.rows), iter(found.row_gradients)
    return tuple(
        tf.IndexedSlices(next(of_rows), next(rows), tf.constant(parameter.shape)) if sparse else next(dense)
        for parameter, sparse in zip(spec.parameters, spec.sparse, strict=True)
    )


def _no_gradient(*_: Any) -> Any:
    raise GradientError(
        "outputs of a dynamic net have no gradient; differentiate its losses and states only. Return the value as part "
        "of the state, or apply tf.stop_gradient to it"
    )


def _gradient(ops: ModuleType, op: Any, *gradients: Any) -> list[Any]:
    """The gradients of the op's inputs, from those of its outputs, as TensorFlow asks for them."""
    import tensorflow as tf

    mode = decoded(op.get_attr("mode"))
    if mode != "training":
        raise GradientError(f"TfmemDynamic in mode '{mode}' has no gradient: call forward(..., training=True)")
    parameters, outputs, states = op.get_attr("N"), op.get_attr("No"), op.get_attr("Ns")
    text = decoded(op.get_attr("spec"))
    sparse = [line.split()[1] == "1" for line in text.splitlines() if line.startswith("parameter ")]
    inputs, results = list(op.inputs), list(op.outputs)
    of_losses = gradients[0] if gradients[0] is not None else tf.zeros_like(results[0])
    of_states = [
        tf.zeros_like(result) if gradient is None else tf.convert_to_tensor(gradient)
        for gradient, result in zip(
            gradients[1 + outputs : 1 + outputs + states], results[1 + outputs : 1 + outputs + states], strict=True
        )
    ]
    names = ("kinds", "kind_splits", "children", "child_splits", "arguments", "argument_splits", "seed")
    found = ops.tfmem_dynamic(
        parameters=inputs[:parameters],
        **dict(zip(names, inputs[parameters : parameters + 7], strict=True)),
        kept=[results[1 + outputs + states]],
        loss_gradients=[of_losses],
        state_gradients=of_states,
        No=outputs,
        Ns=0,
        Nd=len(sparse) - sum(sparse),
        Nr=sum(sparse),
        spec=text,
        mode="backward",
        state_type=op.get_attr("state_type"),
        programs=op.get_attr("programs"),
        images=[getattr(function, "name", function) for function in op.get_attr("images")],
    )
    dense, rows, of_rows = iter(found.gradients), iter(found.rows), iter(found.row_gradients)
    of_parameters = [
        tf.IndexedSlices(next(of_rows), next(rows), tf.shape(inputs[number])) if is_sparse else next(dense)
        for number, is_sparse in enumerate(sparse)
    ]
    return [*of_parameters, *[None] * (len(inputs) - parameters)]
