"""How many steps a loop runs that ends before its bound when its states say so, as when all rows have ended.

The states are computed once more, only to see when the condition stops holding: k steps in one launch, then a look.

    launch of 16 steps --states before each step--> condition --> how many steps it held
    launch of 32 steps, of 0 if it held for less than 16 --> ...
    launch of all other steps up to the bound

The loop itself is then read as one of so many steps. No launch goes on behind what the loop computes, so gradients do
not meet numbers that TensorFlow never computed.
"""

from __future__ import annotations

from dataclasses import replace

from graph_passes.graph.ir import AttrValue, DataType, TensorId
from graph_passes.graph.ops import DRAWS
from graph_passes.graph.rewrite import NewNode
from graph_passes.graph.writer import SHAPE_DTYPE, Dim
from graph_passes.passes.recurrent.find.loops import Unreadable
from graph_passes.passes.recurrent.lower.extent import Counted
from graph_passes.passes.recurrent.lower.hoist import STEP, Hoister
from graph_passes.passes.recurrent.lower.loop import LoopReader
from graph_passes.passes.recurrent.lower.prologue import Hoisted
from graph_passes.passes.recurrent.match import RecurrentNode
from graph_passes.refusals import Reason

FIRST = 16  # steps of the first launch; each that follows takes twice as many as the one before
MOST_LAUNCHES = 6  # the last one takes all that are left
_WHOLE: dict[str, AttrValue] = {"T": DataType(SHAPE_DTYPE)}


class EndReader(LoopReader):
    """Reads a loop to know how many steps it runs."""

    def count(self) -> Counted:
        """
        Raises:
            Unreadable: a cell cannot say when the loop ends.
        """
        self._refuse_side_effects()
        places = self._places()
        results = [self.loop.body.results[place] for place in self.variables.states]
        self.reader.read(results)
        after, initial = self._carried()
        outputs = [self._before(place) for place in places]
        whole = self._launched(after, initial, outputs, ())
        nodes: list[NewNode | RecurrentNode] = []
        prologue, total = self.prologue, self.prologue.time
        going = steps = None
        done = written = 0
        states = whole.directions[0].states
        for size in _sizes(total):
            time = self._time(total, done, size, going)
            launch = self._part(whole, states, total, done, time)
            nodes += [*prologue.nodes[written:], launch]
            written = len(prologue.nodes)
            prologue.time = time
            held = self._held(launch, places)
            steps = held if steps is None else prologue.once("AddV2", [steps, held], _WHOLE)
            more = prologue.cast(
                prologue.once("Equal", [held, prologue.scalar(time)], {**_WHOLE, "incompatible_shape_error": True}),
                "bool",
                SHAPE_DTYPE,
            )
            going = more if going is None else prologue.once("Mul", [going, more], _WHOLE)
            states = tuple(launch.final(index) for index in range(len(states)))
            done += size or 0
        assert steps is not None
        return Counted((*nodes, *prologue.nodes[written:]), steps)

    def _places(self) -> list[int]:
        """The states that the condition reads.

        Raises:
            Unreadable: it reads something else that changes, or the steps draw, and would draw once more.
        """
        condition, body = self.loop.condition, self.loop.body.graph
        drawing = next((node for node in body if node.op in DRAWS), None)
        if drawing is not None:
            raise Unreadable(Reason.SIDE_EFFECTS.of(drawing))
        read = condition.graph.reached([tensor.node for tensor in self.variables.going], condition.graph.predecessors)
        places = [place for place, name in enumerate(condition.arguments) if name in read]
        if not set(places) <= {*self.variables.states, *self.variables.invariants}:
            self._refuse_condition()
        return [place for place in places if place in self.variables.states]

    def _refuse_condition(self) -> None:
        raise Unreadable(Reason.LOOP_CONDITION.of(self.loop.condition.graph[self.variables.going[0].node]))

    def _before(self, place: int) -> tuple[int, ...]:
        """The columns of a state before a step."""
        argument = TensorId(self.loop.body.arguments[place])
        return tuple(map(self._wide, self.reader.columns(argument)))

    def _time(self, total: Dim, done: int, size: int | None, going: TensorId | None) -> Dim:
        """How many steps the next launch takes."""
        prologue = self.prologue
        if isinstance(total, int):
            time: Dim = total - done if size is None else size
        else:
            left = prologue.once("Maximum", [prologue.difference(total, done), prologue.scalar(0)], _WHOLE)
            time = left if size is None else prologue.once("Minimum", [left, prologue.scalar(size)], _WHOLE)
        return time if going is None else prologue.once("Mul", [going, prologue.scalar(time)], _WHOLE)

    def _part(
        self, whole: RecurrentNode, states: tuple[TensorId, ...], total: Dim, done: int, time: Dim
    ) -> RecurrentNode:
        """A launch of `time` steps behind the first `done` ones."""
        prologue, direction = self.prologue, whole.directions[0]
        first: Dim = done
        if not isinstance(total, int):
            first = prologue.once("Minimum", [total, prologue.scalar(done)], _WHOLE)
        sequences = [
            prologue.slice(sequence, self.dtype, (first, *[0] * rank), (time, *[-1] * rank))
            for sequence, columns in zip(direction.sequences, whole.cell.sequences, strict=True)
            for rank in (2 if columns else 1,)
        ]
        name = prologue.name("recurrent_until")
        part = replace(direction, sequences=tuple(sequences), states=states)
        return replace(whole, name=name, directions=(part,), counts=True)

    def _held(self, launch: RecurrentNode, places: list[int]) -> TensorId:
        """Before how many of its steps, without a gap, the condition held."""
        prologue, condition = self.prologue, self.loop.condition
        given: dict[TensorId, Hoisted] = {}
        for index, place in enumerate(places):
            argument = TensorId(self.loop.body.arguments[place])
            given[TensorId(condition.arguments[place])] = self._given(launch, argument, index)
        outside = Hoister(self.graph, self.loop, self.variables, prologue, function=condition, given=given)
        product: TensorId | None = None
        for tensor in self.variables.going:
            if outside.level(tensor) != STEP:
                self._refuse_condition()
            holds = prologue.cast(prologue.steps(outside.hoisted(tensor)), "bool", SHAPE_DTYPE)
            product = holds if product is None else prologue.once("Mul", [product, holds], _WHOLE)
        assert product is not None
        axis = prologue.scalar(0)
        kinds = {**_WHOLE, "Tidx": DataType(SHAPE_DTYPE)}
        until = prologue.once("Cumprod", [product, axis], {**kinds, "exclusive": False, "reverse": False})
        return prologue.once("Sum", [until, prologue.shape([0])], {**kinds, "keep_dims": False})


def _sizes(total: Dim) -> list[int | None]:
    """How many steps each launch takes; None: all that are left."""
    sizes: list[int | None] = []
    size, done = FIRST, 0
    while len(sizes) < MOST_LAUNCHES - 1 and not (isinstance(total, int) and done + size >= total):
        sizes.append(size)
        done, size = done + size, 2 * size
    return [*sizes, None]
