"""Compiles a dynamic network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from custom_ops.errors import DynamicError
from tfmem.dynamic.handle import Handle
from tfmem.dynamic.kinds import NodeKind, State
from tfmem.dynamic.optimizers import Given, checked
from tfmem.options import Options, merged


def specialize(
    parameters: Sequence[tf.Variable],
    kinds: Mapping[str, NodeKind] | None = None,
    *,
    state: State | int | None = None,
    optimizer: Given = None,
    options: Options | None = None,
) -> Handle:
    """Compile a network whose graph differs from example to example.

    Args:
        parameters: all variables of the net, of any rank, each once: float32, float64 or bfloat16, the same for all.
            `Handle.step` does not change those with `trainable=False`.
        kinds: the kinds of nodes by name, made by `tfmem.dynamic.trace` or `tfmem.dynamic.node`. None: graphs are
            recorded op by op, which is slower.
        state: the widths of a node's state; an integer for one vector.
        optimizer: the update rule of `Handle.step`: one of this module, which updates only the rows of a table that a
            batch looks up, or one of `keras.optimizers`.
        options: the device that runs the net and the directory of its GPU kernels; other fields are not used. None:
            environment variables decide.

    Returns:
        The handle that runs batches.

    Raises:
        DynamicError: shapes do not fit, a kind uses a variable that is no parameter, or the op has no such optimizer.
        OpLibraryError: the op library is not built.
        OptionsError: there is no such device, or an environment variable has a value that its option does not take.
    """
    seen: set[int] = set()
    for variable in parameters:
        if id(variable) in seen:
            raise DynamicError(f"parameter '{variable.name}' is listed twice; list each variable once")
        seen.add(id(variable))
    if isinstance(state, int):
        state = (state,)
    return Handle(tuple(parameters), kinds, state, checked(optimizer), merged(options, None, None))
