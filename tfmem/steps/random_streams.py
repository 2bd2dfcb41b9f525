"""Random ops that continue their streams, whichever graph of a step runs.

A stateful random op keeps its position in its kernel, and TensorFlow makes kernels for each graph. So a step that
changes to another graph would restart its streams. The graphs of a step therefore hold ops that share one kernel
(`custom_ops/ops/random/shared_kernels.h`). As in TensorFlow, a stream lasts as long as a kernel of it does:
`tf.random.set_seed` drops all kernels, and streams restart.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef

from custom_ops.load import Library
from tfmem.capture.captured import BODIES, Captured, every_node, functions_in
from tfmem.capture.concrete_function import RestoredFunction, restore_concrete
from tfmem.runtime.engine import Engine
from tfmem.steps.dry_run import without_updates

# These remember what they have seen or read, whatever their seeds.
_REMEMBERING = frozenset(
    {"LearnedUnigramCandidateSampler", "ThreadUnsafeUnigramCandidateSampler", "RecordInput", "Skipgram"}
)
_PREFIX, _STREAM, _DRAW = "TfmemShared", "tfmem_stream", "tfmem_draw"


class Draws:
    """Streams of random numbers that several graphs share."""

    def __init__(self, library: Library) -> None:
        """Open them."""
        self._library = library
        self._stream = library.open_stream()
        weakref.finalize(self, library.close_stream, self._stream)

    def found_in(self, graph_def: GraphDef) -> bool:
        """Whether there is any op whose kernel keeps a position."""
        return any(map(self._keeps_position, every_node(graph_def)))

    def shared(self, graph_def: GraphDef) -> GraphDef:
        """`graph_def` with such ops replaced by those that share their kernels, in loops and branches, too."""
        result = GraphDef()
        result.CopyFrom(graph_def)
        library = {function.signature.name: function for function in graph_def.library.function}
        self._share(result.node, "", library, result, frozenset())
        return result

    def _share(
        self,
        nodes: Iterable[NodeDef],
        path: str,
        library: Mapping[str, FunctionDef],
        result: GraphDef,
        outer: frozenset[str],
    ) -> bool:
        """Edit `nodes`; whether anything was replaced. Each call of a function draws for itself, so it gets a copy."""
        replaced = False
        for node in nodes:
            place = f"{path}{node.name}"
            if self._keeps_position(node):
                node.op = _PREFIX + node.op
                node.attr[_STREAM].i = self._stream
                node.attr[_DRAW].s = place.encode()
                replaced = True
            else:
                for name in BODIES.get(node.op, ()):
                    for index, function in enumerate(functions_in(node.attr[name])):
                        if function.name not in library or function.name in outer:
                            continue
                        body = FunctionDef()
                        body.CopyFrom(library[function.name])
                        inside = f"{place}/{name}.{index}/"
                        if self._share(body.node_def, inside, library, result, outer | {function.name}):
                            body.signature.name = f"{function.name}_draws_{len(result.library.function)}"
                            function.name = body.signature.name
                            result.library.function.append(body)
                            replaced = True
        return replaced

    def _keeps_position(self, node: NodeDef) -> bool:
        """Whether the op has seeds, without which each kernel begins anywhere, and is one that can be shared."""
        seeded = any(name in node.attr and node.attr[name].i for name in ("seed", "seed2"))
        return (seeded or node.op in _REMEMBERING) and self._library.share_op(node.op)


class StepGraphs:
    """Makes functions of the graphs that run in place of one trace; they share its random streams."""

    def __init__(
        self,
        concrete: Any,
        captured: Captured,
        feed_shapes: Mapping[str, tuple[int | None, ...]],
        draws: Draws | None,
        engine: Engine,
    ) -> None:
        """Look for random ops.

        Args:
            concrete: the trace.
            captured: its graph, as it is planned.
            feed_shapes: see `restore_concrete`.
            draws: the streams to continue; by default new ones.
            engine: says whether the step is observed. If not, one graph runs for good for each set of `feed_shapes`.
        """
        self._concrete, self._captured, self._feed_shapes = concrete, captured, feed_shapes
        others = engine.settings.options.observe or bool(feed_shapes)
        draws = (draws or Draws(engine.library)) if others else None
        self._draws = draws if draws and draws.found_in(captured.graph_def) else None
        self._last: Any = None

    @property
    def streams(self) -> Draws | None:
        """The random streams that the graphs share, if there are any."""
        return self._draws

    @property
    def draws(self) -> bool:
        """Whether the graphs share random streams."""
        return self._draws is not None

    def restore(self, graph_def: GraphDef, dry_run: bool = False, captured: Captured | None = None) -> RestoredFunction:
        """A function of `graph_def`.

        Args:
            graph_def: an edited graph of the step.
            dry_run: it must leave everything as it is, the streams, too.
            captured: names what is fetched, where the edited graph has other names.
        """
        if dry_run:
            return self.apart(without_updates(graph_def), captured)
        if self._draws is None:
            return self.apart(graph_def, captured)
        function = self.apart(self._draws.shared(graph_def), captured)
        function.kept_alive = (*function.kept_alive, self._draws)
        function.make_portable = lambda: self.apart(graph_def, captured)
        return function

    def apart(self, graph_def: GraphDef, captured: Captured | None = None) -> RestoredFunction:
        """A function of `graph_def` whose random ops have separate streams; see `restore`."""
        return restore_concrete(self._concrete, captured or self._captured, graph_def, self._feed_shapes)

    def unmoved(self, base: Any, jit_compile: bool) -> Any:
        """What runs where nothing moves.

        Args:
            base: what would run if no other graph did before, or might after.
            jit_compile: whether that is XLA's, which draws other numbers anyway.
        """
        if self._draws is None or jit_compile or getattr(base, "make_portable", None) is not None:
            return base
        return self.restore(self._captured.graph_def)

    def again(self, dry_run: bool) -> str:
        """A note for a step that failed halfway and ran again: a kernel cannot take back numbers that it drew."""
        return "" if self._draws is None or dry_run else "; random ops that had run by then drew again"

    def ran(self, function: Any) -> None:
        """`function` ran last. It is kept until another has run, and so are the kernels that the other goes on with."""
        if getattr(function, "make_portable", None) is not None:
            self._last = function
