"""From a loop to its `Match`, in the first form of its states that can express it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from custom_ops.errors import CellError
from graph_passes.graph.ir import Graph, TensorId
from graph_passes.graph.ops import checks_shape
from graph_passes.graph.rewrite import Names
from graph_passes.passes.recurrent.find.loops import Loop, Unreadable
from graph_passes.passes.recurrent.lower.cell_states import CellForm
from graph_passes.passes.recurrent.lower.ended import EndReader
from graph_passes.passes.recurrent.lower.loop import RULES, LoopReader
from graph_passes.passes.recurrent.lower.step_draws import require_few, require_room
from graph_passes.passes.recurrent.match import Joinable
from graph_passes.refusals import Reason


def read_loop(graph: Graph, loop: Loop, names: Names, keep: Collection[str], trains: bool = False) -> Joinable:
    """What takes the place of `loop`.

    Args:
        graph: the graph around the loop, bodies included.
        loop: one of its loops.
        names: gives names to new nodes.
        keep: names of nodes that are fetched.
        trains: whether what takes its place will be differentiated.

    Raises:
        Unreadable: no cell can express the loop.
    """
    fetched = next((name for name in loop.nodes if name in keep and graph[name].op != "Exit"), None)
    if fetched is not None:
        raise Unreadable(Reason.LOOP_FETCHED(node=fetched))
    checking = next((node.name for node in loop.body.graph if checks_shape(loop.body.graph, node)), None)
    if checking is not None:
        raise Unreadable(Reason.SHAPE_CHECK(node=checking))
    return _read_in(("columns", "numbers", "single"), graph, loop, names, keep, trains)


def _read_in(
    forms: tuple[CellForm, ...], graph: Graph, loop: Loop, names: Names, keep: Collection[str], trains: bool
) -> Joinable:
    """What takes the place of a loop, in the first form that can express it."""
    reasons: list[Unreadable] = []
    for form in forms:
        try:
            return read_in(graph, loop, names, keep, form, trains)
        except Unreadable as reason:
            reasons.append(reason)
        except (CellError, ValueError):  # numpy's, over shapes that do not fit
            if not reasons:
                raise
    raise _told(reasons)


def read_in(
    graph: Graph, loop: Loop, names: Names, keep: Collection[str], form: CellForm, trains: bool = False
) -> Joinable:
    """What takes the place of a loop whose states have this form.

    Raises:
        Unreadable, CellError, ValueError: no cell of the form can express the loop.
    """
    reader = LoopReader(graph, loop, names, keep, form)
    body, steps = reader.loop.body.graph, reader.prologue.time
    if not reader.variables.going:
        found = reader.read()
        if not trains:  # the loop that trains keeps what each step drew
            require_room(body, found.match.nodes, steps, _item_ranks(reader))
        return found
    ending = EndReader(graph, loop, names, keep, form)
    if trains or ending.variables.stepped:  # what the steps assign is known before the launch
        counted = ending.count()
        require_few(body, counted.nodes, steps)
        return LoopReader(graph, loop, names, keep, form, counted).read()
    found = ending.read()
    require_few(body, found.match.nodes, steps)
    return found


def _item_ranks(reader: LoopReader) -> Iterator[int]:
    """The ranks of the items that steps read or write, each step another one."""
    body = reader.loop.body.graph
    written = [write.value for write in reader.writes.values() if write.every_step]
    read = [TensorId(node.name) for node in body if reader.hoister.is_item(TensorId(node.name))]
    for tensor in (*read, *written):
        spec = body.specs.get(tensor)
        if spec is not None and spec.shape is not None:
            yield len(spec.shape)


def _told(reasons: Sequence[Unreadable]) -> Unreadable:
    """What the report says of a loop that no form can express."""
    first, *others = reasons
    for other in others:
        if first.refusal.reason is Reason.STATE_SHAPE:
            return other  # it says what is in the way of a state of such a shape
        whole = first.refusal.reason is Reason.STATE_DTYPE  # whole numbers may be states of small recurrences
        if (whole and other.refusal.reason not in (Reason.STATE_DTYPE, Reason.NO_STATE)) or (
            other.refusal.reason is Reason.CELL_NODES
            or (other.refusal.reason is Reason.CELL_NUMBERS and _is_small_op(first))
        ):
            return Unreadable(Reason.BECAUSE_SMALL(first=first.refusal, because=other.refusal))
    return first


def _is_small_op(reason: Unreadable) -> bool:
    """Whether what is in the way is an op that a recurrence with small states may have."""
    return dict(reason.refusal.arguments).get("op") in RULES
