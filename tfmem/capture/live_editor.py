"""Captures and edits a `tf.Graph` in place: its users hold its tensors, so it cannot be rebuilt.

Relies on private TensorFlow API: `Operation._update_input`, `_add_control_input`,
`_remove_all_control_inputs`, and the `_graph` of sessions.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import tensorflow as tf
from tensorflow.python.client import session as sessions

from custom_ops.image_functions import add_to
from graph_passes.errors import GraphError, GraphInUseError
from graph_passes.graph.ir import AttrValue, TensorId
from graph_passes.graph.serde import codes_of, encode
from tfmem.capture.build import annotate_handles
from tfmem.capture.captured import Captured, side_effects, unique


def capture_graph(graph: tf.Graph) -> Captured:
    """What a live graph holds, a `tf.Graph` or that of a function, finished or being built. Every tensor that nothing
    reads is fetched. Names are those of the graph, so a plan made from it can be applied to it.
    """
    operations = graph.get_operations()
    graph_def = graph.as_graph_def()
    inputs = getattr(graph, "inputs", None)  # a FuncGraph's
    if inputs is None:
        inputs = [op.outputs[0] for op in operations if op.type in ("Placeholder", "PlaceholderV2")]
    annotate_handles(graph_def, inputs, rename=False)
    control = [op.name for op in getattr(graph, "control_outputs", ())]
    return Captured(
        graph_def=graph_def,
        feeds=tuple(tensor.name for tensor in inputs),
        fetches=tuple(tensor.name for op in operations for tensor in op.outputs if not tensor.consumers()),
        control_fetches=unique([*control, *side_effects(operations)]),
        creation_order=tuple(op.name for op in operations),
        traced={"": graph},
    )


class LiveEditor:
    """The `Editor` of the IR over a live graph. It checks each edit first: an edit that fails changes nothing. Callers
    edit a copy before (`verify_graph`), which shows whether all edits together close a cycle.

    Edits belong at the top level: bodies of While and If are separate functions, and no inserted op
    is in a frame of a `tf.compat.v1.while_loop`.
    """

    def __init__(self, graph: tf.Graph) -> None:
        """
        Raises:
            GraphInUseError: the graph is finalized, or a session of it is open. A session keeps a
                copy of what it ran and breaks when that is edited; whether it has run cannot be
                asked, so an open one counts.
        """
        _refuse_if_in_use(graph)
        self._graph = graph
        self._undo: list[Callable[[], None]] = []

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Restore the edges if an error leaves the block. Inserted ops stay, but no op reads them: TensorFlow cannot
        remove an op from a graph. An error that leaves a block around this one restores these edges as well.
        """
        before, self._undo = self._undo, []
        try:
            yield
        except Exception:
            done, self._undo = self._undo, []
            for undo in reversed(done):
                undo()
            self._undo = []
            raise
        finally:
            self._undo = [*before, *self._undo]

    def insert(
        self,
        name: str,
        op: str,
        inputs: Sequence[TensorId],
        attrs: Mapping[str, AttrValue],
        device: str = "",
        control: Sequence[str] = (),
        outputs: int = 1,
    ) -> str:
        """See `Editor.insert`; TensorFlow knows how many outputs an op has.

        Raises:
            GraphError: an input or control op is missing, or TensorFlow refuses the op.
        """
        tensors = [self._tensor(tensor) for tensor in inputs]
        waits = [self._operation(before) for before in control]
        graph = self._graph
        with (
            graph.as_default(),
            tf.control_dependencies(None),
            tf.device(None),
            graph.name_scope(None),
            tf.control_dependencies(waits),
            tf.device(device or None),
        ):
            try:
                add_to(graph, codes_of(attrs))
                made = graph.create_op(op, tensors, name=name, attrs={k: encode(v) for k, v in attrs.items()})
            except (TypeError, ValueError, RuntimeError, tf.errors.OpError) as error:
                raise GraphError(f"TensorFlow refuses op '{name}' of type {op}: {error}") from error
        return str(made.name)

    def rewire(self, node: str, index: int, source: TensorId) -> None:
        """See `Editor.rewire`.

        Raises:
            GraphError: no such op, input or tensor, or another dtype.
        """
        reader, tensor = self._operation(node), self._tensor(source)
        if not 0 <= index < len(reader.inputs):
            raise GraphError(f"op '{node}' has {len(reader.inputs)} inputs; there is no input {index}")
        old = reader.inputs[index]
        if old.dtype != tensor.dtype:
            raise GraphError(f"input {index} of op '{node}' is {old.dtype.name}, but '{source}' is {tensor.dtype.name}")
        reader._update_input(index, tensor)
        self._undo.append(lambda: self.rewire(node, index, TensorId(old.op.name, old.value_index)))

    def add_control(self, node: str, after: str) -> None:
        """See `Editor.add_control`.

        Raises:
            GraphError: no such op.
        """
        waiting, first = self._operation(node), self._operation(after)
        if first in waiting.control_inputs:
            return
        waiting._add_control_input(first)
        self._undo.append(lambda: self.remove_control(node, after))

    def remove_control(self, node: str, after: str) -> None:
        """See `Editor.remove_control`.

        Raises:
            GraphError: no such op.
        """
        waiting, first = self._operation(node), self._operation(after)
        kept = [before for before in waiting.control_inputs if before is not first]
        if len(kept) < len(waiting.control_inputs):
            waiting._remove_all_control_inputs()
            waiting._add_control_inputs(kept)
            self._undo.append(lambda: self.add_control(node, after))

    def _operation(self, name: str) -> tf.Operation:
        try:
            return self._graph.get_operation_by_name(name)
        except (KeyError, ValueError) as error:
            raise GraphError(f"the graph has no op '{name}'") from error

    def _tensor(self, tensor: TensorId) -> tf.Tensor:
        outputs = self._operation(tensor.node).outputs
        if not 0 <= tensor.index < len(outputs):
            raise GraphError(f"op '{tensor.node}' has {len(outputs)} outputs; there is no '{tensor}'")
        return outputs[tensor.index]


def _refuse_if_in_use(graph: tf.Graph) -> None:
    if graph.finalized:
        raise GraphInUseError("the graph is finalized (a MonitoredSession does that); optimise it before")
    if graph.building_function:
        return
    # TensorFlow keeps no list of a graph's sessions, and a session no record of having run.
    for candidate in gc.get_objects():
        if issubclass(type(candidate), sessions.BaseSession) and candidate._graph is graph and not candidate._closed:
            raise GraphInUseError(
                "a session of this graph is open and may have run it: edits would break it; "
                "optimise the graph before the session is made, or close the session first"
            )
