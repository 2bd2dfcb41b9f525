"""Loops that end before their bound when their states say so, as when all rows have ended.

The steps run in several launches: so many in one, then a look whether the condition still holds.

    launch of 8 steps --states before each step--> condition --> how many steps it held
    launch of 12 steps, of 0 if it held for less than 8 --> ...
    launch of all other steps up to the bound

In inference the results are those of the launches, up to the last step that the loop runs. In training these launches
only count, and the loop is then read as one of so many steps: gradients must not meet numbers behind its end, which
TensorFlow never computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from custom_ops.recurrent.cell import Cell
from graph_passes.graph.ir import AttrValue, DataType, TensorId
from graph_passes.graph.rewrite import NewNode
from graph_passes.graph.writer import SHAPE_DTYPE, Dim
from graph_passes.passes.recurrent.find.counting import of_key
from graph_passes.passes.recurrent.find.loops import Unreadable
from graph_passes.passes.recurrent.lower.extent import Counted
from graph_passes.passes.recurrent.lower.hoist import STEP, Hoister
from graph_passes.passes.recurrent.lower.loop import LoopReader
from graph_passes.passes.recurrent.lower.prologue import Hoisted
from graph_passes.passes.recurrent.lower.unreached import may_fail, require_harmless
from graph_passes.passes.recurrent.match import RecurrentNode, Results
from graph_passes.refusals import Reason

FIRST = 8  # steps of the first launch; each that follows takes half as many more as the one before
MOST_LAUNCHES = 10  # the last one takes all that are left, which are no more than a tensor has items
MOST_STEPS = 1 << 16  # as a bound that is no size of a tensor: users write a large one where they expect none
_ALL_LAUNCHES = 21  # for as many steps
_WHOLE: dict[str, AttrValue] = {"T": DataType(SHAPE_DTYPE)}


@dataclass(frozen=True)
class Parts:
    """What launches give, one behind the other, of the steps that the loop runs; `Results`."""

    cell: Cell
    outputs: tuple[TensorId, ...]
    finals: tuple[TensorId, ...]

    def output(self, index: int) -> TensorId:
        """Output `index` of the cell, of every step."""
        return self.outputs[index]

    def final(self, index: int) -> TensorId:
        """State `index` after the last step."""
        return self.finals[index]


class EndReader(LoopReader):
    """Reads a loop that ends when its states say so, or counts how many steps it runs."""

    def count(self) -> Counted:
        """How many steps the loop runs, which are then run once more.

        Raises:
            Unreadable: a cell cannot say when the loop ends.
        """
        self._refuse_side_effects()
        body, places = self.loop.body, self._places()
        self._refuse_unreached()
        self.reader.read([body.results[place] for place in self.variables.states])
        after, initial = self._carried()
        before, counts_alone = list(map(self._before, places)), not self.reader.leaves.sequences
        whole = self._launched(after, initial, before, ())
        nodes, _, steps = self._until(whole, dict(enumerate(places)), counts_alone)
        return Counted(tuple(nodes), steps, dict(self.prologue.drawn))

    def _run(self) -> tuple[list[NewNode | RecurrentNode], Results]:
        """Launches until the loop has ended, and what they give of its steps."""
        prologue, dtype, places = self.prologue, self.dtype, self._places()
        self._refuse_unreached()
        after, initial, outputs = self._results(of_key(TensorId(f"{self.loop.name}/steps")))  # nothing is equal to it
        before, count = list(map(self._before, places)), len(outputs)
        alone = {number: outputs.index((column,)) for number, column in enumerate(after) if (column,) in outputs}
        others = [number for number in range(len(after)) if number not in alone]
        beside = [tuple(after[number] for number in others)] if others else []
        counts_alone = not self.reader.leaves.sequences
        whole = self._launched(after, initial, [*outputs, *before, *beside], ())
        nodes, parts, steps = self._until(whole, dict(enumerate(places, count)), counts_alone)
        end, written = parts[-1][0], len(prologue.nodes)
        nodes[nodes.index(end)] = replace(end, counts=False)
        prologue.end_after(steps)
        results = list[TensorId]()
        for index in range(count):
            joined = prologue.joined([launch.output(index) for launch, _ in parts], dtype, 0)
            results.append(prologue.first(joined, dtype, 3 if whole.cell.output_columns[index] else 2))
        finals = {number: self._reached(parts, index, [initial[number]]) for number, index in alone.items()}
        if others:
            last = self._reached(parts, count + len(places), [initial[number] for number in others])
            finals |= dict(zip(others, prologue.split(last, dtype, [self.units] * len(others), 1), strict=True))
        given = Parts(whole.cell, tuple(results), tuple(finals[number] for number in range(len(after))))
        return [*nodes, *prologue.nodes[written:]], given

    def _reached(
        self, parts: Sequence[tuple[RecurrentNode, TensorId]], index: int, initial: Sequence[TensorId]
    ) -> TensorId:
        """States after the last step, side by side as in output `index`; those before the first if there is none."""
        prologue, dtype = self.prologue, self.dtype
        found, ran = [prologue.expanded(prologue.joined(initial, dtype, 1), dtype, 0)], prologue.scalar(0)
        for launch, held in parts:
            any_held = prologue.once("Minimum", [held, prologue.scalar(1)], _WHOLE)
            last = prologue.once("Sub", [held, any_held], _WHOLE)
            found.append(prologue.slice(launch.output(index), dtype, (last, 0, 0), (any_held, -1, -1)))
            ran = prologue.once("AddV2", [ran, any_held], _WHOLE)
        reached = prologue.slice(prologue.joined(found, dtype, 0), dtype, (ran, 0, 0), (1, -1, -1))
        return prologue.reshape(reached, dtype, (prologue.batch, len(initial) * self.units))

    def _until(
        self, whole: RecurrentNode, before: Mapping[int, int], counts_alone: bool
    ) -> tuple[list[NewNode | RecurrentNode], list[tuple[RecurrentNode, TensorId]], TensorId]:
        """What is to be inserted, the launches of it, each with how many of its steps the loop runs, and all together.

        Args:
            whole: a launch of all steps.
            before: its outputs that are states before a step, and which those are.
            counts_alone: whether its sequence is nothing but the number of steps.
        """
        nodes: list[NewNode | RecurrentNode] = []
        parts: list[tuple[RecurrentNode, TensorId]] = []
        prologue, total = self.prologue, self.prologue.time
        going = steps = None
        done = written = 0
        states = whole.directions[0].states
        for size in _sizes(total, prologue.time_form.is_size):
            time = self._time(total, done, size, going)
            launch = self._part(whole, states, total, done, time, counts_alone)
            nodes += [*prologue.nodes[written:], launch]
            written = len(prologue.nodes)
            prologue.time = time
            held = self._held(launch, before)
            parts.append((launch, held))
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
        return [*nodes, *prologue.nodes[written:]], parts, steps

    def _places(self) -> list[int]:
        """The states that the condition reads.

        Raises:
            Unreadable: it reads something else that changes.
        """
        condition = self.loop.condition
        read = condition.graph.reached([tensor.node for tensor in self.variables.going], condition.graph.predecessors)
        places = [place for place, name in enumerate(condition.arguments) if name in read]
        if not set(places) <= {*self.variables.states, *self.variables.invariants}:
            self._refuse_condition()
        return [place for place in places if place in self.variables.states]

    def _refuse_unreached(self) -> None:
        """Raises Unreadable if steps up to the bound, which the loop may not reach, may fail or are too many."""
        steps = self.prologue.time
        if isinstance(steps, int) and steps > MOST_STEPS:
            raise Unreadable(Reason.LOOP_BOUND_LARGE(steps=steps, most=MOST_STEPS))
        require_harmless(self.graph, self.loop, self.hoister, self.numbers, self.prologue.time_form)

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
        self, whole: RecurrentNode, states: tuple[TensorId, ...], total: Dim, done: int, time: Dim, counts_alone: bool
    ) -> RecurrentNode:
        """A launch of `time` steps behind the first `done` ones; `counts_alone`: its sequence says their number."""
        prologue, direction = self.prologue, whole.directions[0]
        first: Dim = done
        if not isinstance(total, int):
            first = prologue.once("Minimum", [total, prologue.scalar(done)], _WHOLE)
        sequences = [
            prologue.slice(sequence, self.dtype, (first, *[0] * rank), (time, *[-1] * rank))
            for sequence, columns in zip(direction.sequences, whole.cell.sequences, strict=True)
            for rank in (2 if columns else 1,)
        ]
        if counts_alone:  # up to the bound it might not fit into memory
            sequences = [prologue.zeros(self.dtype, (time, prologue.batch))]
        name = prologue.name("recurrent_until")
        part = replace(direction, sequences=tuple(sequences), states=states)
        return replace(whole, name=name, directions=(part,), counts=True)

    def _held(self, launch: RecurrentNode, before: Mapping[int, int]) -> TensorId:
        """Before how many of its steps, without a gap, the condition held."""
        prologue, condition = self.prologue, self.loop.condition
        given: dict[TensorId, Hoisted] = {}
        for index, place in before.items():
            argument = TensorId(self.loop.body.arguments[place])
            given[TensorId(condition.arguments[place])] = self._given(launch, argument, index)
        outside = Hoister(self.graph, self.loop, self.variables, prologue, function=condition, given=given)
        for node in condition.graph:
            if may_fail(condition.graph, node, outside):
                raise Unreadable(Reason.STEP_FAILS.of(node))
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


def _sizes(total: Dim, is_size: bool) -> list[int | None]:
    """How many steps each launch takes; None: all that are left.

    Args:
        total: the bound.
        is_size: whether it is known to be as small as a tensor's size.
    """
    sizes: list[int | None] = []
    size, done = FIRST, 0
    most = MOST_LAUNCHES if is_size and not isinstance(total, int) else _ALL_LAUNCHES
    while len(sizes) < most - 1 and not (isinstance(total, int) and done + size >= total):
        sizes.append(size)
        done, size = done + size, size + size // 2
    return [*sizes, None]
