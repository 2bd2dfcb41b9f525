"""TfmemDynamic and TfmemDynamicStep in TensorFlow: calls, and the gradient, which is the same op in another mode."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from custom_ops.dynamic.codegen.gpu_program import DynamicProgram
from custom_ops.dynamic.node_code import OPEN_ROWS, Parameter
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
    dense, sparse = len(spec.sparse) - sum(spec.sparse), sum(spec.sparse)
    given = [] if loss_weights is None else [loss_weights]
    back = _back(parameters)
    found = _call(
        ops, spec, program, parameters, batch, seed, "forward_backward", loss_gradients=given, Nd=dense, Nr=sparse
    )
    gradients = _gradients(spec, found, parameters)
    return back(found.losses), tuple(map(back, found.outputs)), tuple(map(back, gradients))


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
    back = _back(parameters)
    return back(found.losses), tuple(map(back, outputs)), tuple(map(back, found.states))


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

    in_host_memory = {**_integers(batch), "seed": seed_of(seed), "rates": rates, "number": tf.cast(number, tf.int64)}
    found = ops.tfmem_dynamic_step(
        variables=[variable.handle for variable in variables],
        **_crossing(ops, program, variables, in_host_memory),
        loss_gradients=[] if loss_weights is None else [tf.cast(loss_weights, rates.dtype)],
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


def _crossing(
    ops: ModuleType, program: DynamicProgram | None, parameters: Sequence[Any], tensors: dict[str, tf.Tensor]
) -> dict[str, tf.Tensor]:
    """Tensors that an op in a graph takes in host memory; those for a GPU cross as one from the CPU.

    TensorFlow sends each tensor that crosses by itself, and wakes a thread for each.
    """
    import tensorflow as tf

    device = next((each.device for each in parameters if isinstance(each, tf.Variable)), None)
    if program is None or device is None or tf.executing_eagerly():
        return tensors
    with tf.device("/CPU:0"):
        bundle = ops.tfmem_bundle(tensors=list(tensors.values()))
    with tf.device(device):
        types, shapes = zip(*((tensor.dtype, tensor.shape) for tensor in tensors.values()), strict=True)
        return dict(zip(tensors, ops.tfmem_unbundle(bundle=bundle, T=types, shapes=shapes), strict=True))


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
    given = [tf.convert_to_tensor(parameter) for parameter in parameters]
    given = [tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor for tensor in given]
    lists["loss_gradients"] = [
        tf.cast(each, given[0].dtype if given else tf.float32) for each in lists["loss_gradients"]
    ]
    counts = {name: other.pop(name, 0) for name in ("Ns", "Nd", "Nr")}
    run = ops.tfmem_dynamic
    if tf.executing_eagerly() and not given:  # there TensorFlow takes an op's type from its inputs, never the default
        run = tf.function(run, autograph=False)
    return run(
        parameters=given,
        **_crossing(ops, program, parameters, {**_integers(batch), "seed": seed_of(seed)}),
        **lists,
        **counts,
        No=_outputs(spec),
        spec=spec.text,
        mode=mode,
        **_programs(program),
        **other,
    )


def _back(parameters: Sequence[Any]) -> Callable[[Any], Any]:
    """What gives results of the op the parameters' type; the op computes in float32 for bfloat16."""
    import tensorflow as tf

    if not parameters or parameters[0].dtype != tf.bfloat16:
        return lambda tensor: tensor
    return lambda tensor: tf.cast(tensor, tf.bfloat16)


def _gradients(spec: Spec, found: Any, given: Sequence[Any]) -> tuple[Any, ...]:

    dense, rows, of_rows = iter(found.gradients), iter(found.rows), iter(found.row_gradients)
    gradients = tuple(
        _slices(tensor, next(of_rows), next(rows), _shape(parameter, tensor))
        if sparse
        else _with_shape(next(dense), tensor.shape)
        for parameter, sparse, tensor in zip(spec.parameters, spec.sparse, given, strict=True)
    )
    return _for_replicas(gradients)


def _with_shape(gradient: tf.Tensor, shape: Any) -> tf.Tensor:
    """A gradient in the shape of its parameter, which the op sees as a matrix or as a vector."""
    import tensorflow as tf

    return gradient if gradient.shape.rank == shape.rank else tf.reshape(gradient, shape)


def _slices(given: Any, gradient: tf.Tensor, rows: tf.Tensor, shape: tf.Tensor) -> tf.IndexedSlices:
    """The gradient of `given`, of which the op saw rows of a matrix."""
    import tensorflow as tf

    if given.shape.rank != 2:
        gradient = tf.reshape(gradient, [-1, *given.shape[1:]])
    return tf.IndexedSlices(gradient, rows, shape)


def _shape(parameter: Parameter, given: Any) -> tf.Tensor:
    import tensorflow as tf

    if parameter.shape[0] == OPEN_ROWS:
        return tf.shape(tf.convert_to_tensor(given))
    return tf.constant(given.shape.as_list(), tf.int32)


def _for_replicas(gradients: Sequence[Any]) -> tuple[Any, ...]:
    """`gradients`; in one of several replicas those of tables as tensors.

    TensorFlow sums rows by listing those of all replicas, so a row may come twice. Keras 3's Adam would take the square
    of each, and not of their sum.
    """
    import tensorflow as tf

    alone = tf.distribute.in_cross_replica_context() or tf.distribute.get_strategy().num_replicas_in_sync == 1
    return tuple(gradients if alone else map(tf.convert_to_tensor, gradients))


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
        _slices(inputs[number], next(of_rows), next(rows), tf.shape(inputs[number]))
        if is_sparse
        else _with_shape(next(dense), inputs[number].shape)
        for number, is_sparse in enumerate(sparse)
    ]
    return [*_for_replicas(of_parameters), *[None] * (len(inputs) - parameters)]
