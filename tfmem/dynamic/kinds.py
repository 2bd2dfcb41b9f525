"""Kinds of nodes, written as Python functions over one node."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from custom_ops.dynamic.node_code import Instruction, Kind
from custom_ops.errors import DynamicError
from tfmem.dynamic.expressions import expression_at, place_of
from tfmem.dynamic.extension import Expression
from tfmem.dynamic.recorder import Argument, Recorder
from tfmem.dynamic.user_lines import named

State = tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """What the function of a node kind returns.

    Attributes:
        state: what the node's parents get, a vector or a tuple of vectors.
        loss: a number, whose sum over the nodes of an example is the example's loss.
        outputs: vectors for the caller, such as logits; they have no gradient.
    """

    state: Any = ()
    loss: Any = None
    outputs: Any = ()


@dataclass(frozen=True)
class NodeKind:
    """A function over one node.

    Attributes:
        function: `function(children, *arguments)` gives a `Result`, or the state alone. `children` has for each child
            its state: a tuple of vectors, or the vector if there is one. Arguments are integers: the parameters without
            a default. Those with one, and keywords of `functools.partial`, keep their values. A keyword `training`
            without a default is whether the net is trained.
        children: how many; a range of numbers; or for each child the widths of its state.
        traced: whether the function is written in TensorFlow's ops.
    """

    function: Callable[..., Any]
    children: int | range | tuple[State, ...] = 0
    traced: bool = False

    @property
    def takes_training(self) -> bool:
        """Whether the function has a keyword `training`, without a default: whether it is called for training."""
        found = inspect.signature(self.function).parameters.get("training")
        return found is not None and found.kind is found.KEYWORD_ONLY and found.default is found.empty

    @property
    def arguments(self) -> int:
        """How many integer arguments the function has.

        Raises:
            DynamicError: it is no function over a node.
        """
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError) as error:
            raise DynamicError(
                f"{self.function!r} cannot be the function of a node: {error}; pass a function"
            ) from None
        given = [each for each in signature.parameters.values() if each.default is each.empty]
        given = [each for each in given if each.kind is not each.VAR_KEYWORD]
        given = [each for each in given if each.name != "training" or each.kind is not each.KEYWORD_ONLY]
        for each in given:
            if each.kind not in {each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD}:
                raise DynamicError(
                    f"{self.function!r}{signature}: expected positional parameters only, the children and then each "
                    f"integer argument; remove '{each}', or give it a default"
                )
        if not given:
            raise DynamicError(f"{self.function!r}{signature}: expected a parameter that takes the children")
        return len(given) - 1


def node(function: Callable[..., Any], *, children: int | range | Sequence[State] = 0) -> NodeKind:
    """A kind of node, by a function in the expressions of this module.

    Args:
        function: `function(children, *arguments)`: see `NodeKind`.
        children: how many children its nodes have, if their states have the widths that `specialize` is given; a range
            of such numbers, each of which becomes a kind; or those widths for each child.

    Returns:
        A kind for `specialize`, which calls the function.
    """
    return NodeKind(function, _children(children))


def trace(function: Callable[..., Any], *, children: int | range | Sequence[State] = 0) -> NodeKind:
    """A kind of node, by a function in TensorFlow's ops on one node: vectors `[width]` and integer scalars.

    `specialize` traces it once by `tf.function` and reads its graph. It may use a Keras cell, `tf.linalg.matvec`,
    `tf.nn.embedding_lookup`, `tf.split` and similar ops.

    Args:
        function: `function(children, *arguments)`: see `NodeKind`.
        children: as for `node`.
    """
    return NodeKind(function, _children(children), traced=True)


def _children(children: int | range | Sequence[State]) -> int | range | tuple[State, ...]:
    return children if isinstance(children, int | range) else tuple(tuple(widths) for widths in children)


def record(
    name: str,
    kind: NodeKind,
    variables: Sequence[tf.Variable],
    state: State | None,
    views: dict[int, int],
    *,
    training: bool,
) -> Kind:
    """The code of a kind.

    Args:
        name: of the kind.
        kind: the function.
        variables: the parameters.
        state: the widths of a child's state, where `kind` says none.
        views: how kinds see parameters (`Recorder`); added to.
        training: whether dropout drops.

    Raises:
        DynamicError: the function uses a value that is no part of its node, or shapes do not fit.
    """
    if not isinstance(kind, NodeKind):
        raise DynamicError(f"kind '{name}' is {kind!r}; expected tfmem.dynamic.node(...) or tfmem.dynamic.trace(...)")
    children = kind.children
    if isinstance(children, range):
        raise DynamicError(f"kind '{name}' has {children} children; expected one number")
    if isinstance(children, int):
        if children and state is None:
            raise DynamicError(
                f"kind '{name}' has {children} children of unknown width; pass specialize(..., state=...)"
            )
        children = (tuple(state or ()),) * children
    recorder = Recorder(variables, [None] * kind.arguments, training, views=views)
    add = recorder.builder.add
    states = [
        tuple(
            expression_at(recorder, add(Instruction("child", width, (), (slot, i)))) for i, width in enumerate(widths)
        )
        for slot, widths in enumerate(children)
    ]
    arguments = [Argument(recorder, number) for number in range(kind.arguments)]
    function = partial(kind.function, training=training) if kind.takes_training else kind.function
    try:
        if kind.traced:
            from tfmem.dynamic.traced import call_traced

            found = call_traced(name, function, recorder, states, arguments)
        else:
            given = tuple(vectors[0] if len(vectors) == 1 else vectors for vectors in states)
            found = function(given, *arguments)
        return finish(name, recorder, children, found)
    except DynamicError as error:
        raise named(name, function, error) from error
    except Exception as error:
        error.add_note(f"In the function of node kind '{name}', which tfmem.dynamic called with one node.")
        raise


def finish(name: str, recorder: Recorder, children: tuple[State, ...], found: Any) -> Kind:
    """The kind whose function returned `found`."""
    result = found if isinstance(found, Result) else Result(state=found)
    builder = recorder.builder
    places = [_whole(recorder, vector) for vector in _vectors(name, "state", result.state)]
    for number, place in enumerate(places):
        builder.sink("put_state", place, numbers=(number,))
    outputs = [_whole(recorder, vector) for vector in _vectors(name, "outputs", result.outputs)]
    for number, place in enumerate(outputs):
        builder.sink("put_output", place, numbers=(number,))
    if result.loss is not None:
        (vector,) = _vectors(name, "loss", (result.loss,))
        if vector.width != 1:
            raise DynamicError(f"the loss of kind '{name}' has {vector.width} numbers; expected one number")
        builder.sink("put_loss", _whole(recorder, vector))
    unused = [number for number, bound in enumerate(recorder.bounds) if bound is None]
    if unused:
        raise DynamicError(f"kind '{name}' never uses its integer argument {unused[0]}; remove the argument")
    return Kind(
        name,
        children,
        tuple(bound for bound in recorder.bounds if bound is not None),
        tuple(map(builder.width, places)),
        tuple(map(builder.width, outputs)),
        tuple(builder.code),
    )


def _vectors(name: str, what: str, given: Any) -> tuple[Expression, ...]:
    vectors = tuple(given) if isinstance(given, tuple | list) else (given,)
    for vector in vectors:
        if not isinstance(vector, Expression):
            raise DynamicError(
                f"kind '{name}' returns {type(vector).__name__} as {what}; expected expressions of tfmem.dynamic, or "
                "tfmem.dynamic.trace for a function in TensorFlow's ops"
            )
    return vectors


def _whole(recorder: Recorder, vector: Expression) -> int:
    """The position of a vector in the code; a constant is broadcast to one."""
    place = place_of(recorder, vector)
    if recorder.builder.code[place].op != "constant":
        return place
    return recorder.builder.add(Instruction("broadcast", 1, (place,)))
