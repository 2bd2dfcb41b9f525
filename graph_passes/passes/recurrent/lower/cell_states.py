"""The states of a loop: which there may be, and how a launch takes and gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from graph_passes.graph.ir import Graph, TensorId
from graph_passes.graph.ops import FLOATS, passed
from graph_passes.graph.writer import Dim
from graph_passes.passes.recurrent.find.equal_scalars import Key, dimension_key
from graph_passes.passes.recurrent.find.loops import COMPLEX, Loop, Unreadable, Variables
from graph_passes.passes.recurrent.lower.layouts import ColumnLayout
from graph_passes.passes.recurrent.lower.leaves import state_of, states_of
from graph_passes.passes.recurrent.lower.prologue import Prologue, static
from graph_passes.refusals import Reason

CellForm: TypeAlias = Literal["columns", "numbers", "single"]


@dataclass(frozen=True, eq=False)
class States:
    """The states of one loop.

    Attributes:
        graph: the graph around the loop.
        loop: the loop.
        variables: what its variables are.
        form: "columns": states are matrices of columns (`to_cell.py`); "numbers": each number of a row is a column
            (`numbers.py`); "single": the same, of a loop without a batch.
    """

    graph: Graph
    loop: Loop
    variables: Variables
    form: CellForm

    def dtype(self) -> str:
        """The dtype of all states.

        Raises:
            Unreadable: there are several, or a state is no matrix.
        """
        found: dict[str, str] = {}
        for place in self.variables.states:
            name = self.name(place)
            spec = self.graph.specs.get(self.loop.initial[place])
            shape, dtype = self.shape(place), spec.dtype if spec is not None else ""
            if dtype in COMPLEX:
                raise Unreadable(Reason.STATE_COMPLEX(node=name, dtype=dtype))
            inside = self.loop.body.graph.specs.get(TensorId(self.loop.body.arguments[place]))
            ranks = {len(each.shape) for each in (spec, inside) if each is not None and each.shape is not None}
            if len(ranks) > 1:
                raise Unreadable(Reason.STATE_SHAPE(node=name, shape=spec and spec.shape))
            if shape is not None and 0 in shape[1:]:
                raise Unreadable(Reason.STATE_UNITS(node=name, units=0))
            if self.form != "columns" and shape is not None and (shape or self.form == "single"):
                if dtype in FLOATS:
                    found[dtype] = name
                if dtype in (*FLOATS, "int32", "int64", "bool"):
                    continue
            if dtype == "bool" and shape is not None and len(shape) in (1, 2):
                continue
            if dtype not in FLOATS:
                seed = self._is_seed(dtype, shape)
                raise Unreadable(Reason.STATE_SEED(node=name) if seed else Reason.STATE_DTYPE(node=name, dtype=dtype))
            if shape is None or len(shape) > 2:
                raise Unreadable(Reason.STATE_SHAPE(node=name, shape=spec and spec.shape))
            if len(shape) == 2 and not shape[1]:
                raise Unreadable(Reason.STATE_UNITS(node=name, units=shape[1]))
            found[dtype] = name
        if not found:
            raise Unreadable(Reason.NO_STATE())
        if len(found) > 1:
            types = ", ".join(f"'{name}' {dtype}" for dtype, name in found.items())
            raise Unreadable(Reason.STATE_DTYPES(types=types))
        return next(iter(found))

    def _is_seed(self, dtype: str, shape: tuple[int | None, ...] | None) -> bool:
        """Whether a state is two numbers in a cell that draws by seeds."""
        draws = any(node.op.startswith("StatelessRandom") for node in self.loop.body.graph)
        return draws and shape == (2,) and dtype in ("int32", "int64", "uint32", "uint64")

    def name(self, place: int) -> str:
        """The op that makes a state; its name has the layer's and the cell's, which that of a loop variable has not."""
        body = self.loop.body
        maker = passed(body.graph, body.results[place]).node
        return body.arguments[place] if maker in body.arguments else maker

    def shape(self, place: int) -> tuple[int | None, ...] | None:
        """The shape of a state, if its rank is known."""
        outside = self.graph.specs.get(self.loop.initial[place])
        inside = self.loop.body.graph.specs.get(TensorId(self.loop.body.arguments[place]))
        shapes = [spec.shape for spec in (outside, inside) if spec is not None and spec.shape is not None]
        known = (shape for shape in shapes if len(shape) != 2 or shape[1] is not None)
        return next(known, shapes[0] if shapes else None)

    def count_rows(self, prologue: Prologue) -> frozenset[Key]:
        """Tell the prologue how many rows there are; all that this number is known to be equal to."""
        if self.form == "single":
            prologue.batch = 1
            return frozenset({1})
        ranked = [place for place in self.variables.states if self.shape(place) != ()]
        states = [self.loop.initial[place] for place in ranked]
        if not states:
            prologue.batch = 1
            return frozenset({1})
        keys = frozenset(dimension_key(self.graph, state, 0) for state in states)
        number = min((key for key in keys if isinstance(key, int)), default=None)
        kind = self.graph.specs[states[0]].dtype  # a whole number's, perhaps
        prologue.batch = prologue.scalar_of_shape(states[0], kind, 0) if number is None else number
        single = next((place for place in self.variables.states if place not in ranked), None)
        if single is not None and not number:
            raise Unreadable(Reason.STATE_SINGLE(node=self.name(single)))
        return keys

    def initial(self, prologue: Prologue, place: int, layout: ColumnLayout, dtype: str) -> list[TensorId]:
        """A state before the loop, as the launch takes it."""
        tensor = self.loop.initial[place]
        rank = len(self.shape(place) or ())
        tensor = prologue.cast(tensor, self.graph.specs[tensor].dtype, dtype)
        if self.form != "columns":
            if rank != 2 or self.form == "single":
                tensor = prologue.reshape(tensor, dtype, (prologue.batch, layout.width))
            rank = 2
        return states_of(prologue, tensor, dtype, rank, layout)

    def final(
        self, prologue: Prologue, finals: list[TensorId], place: int, layout: ColumnLayout, dtype: str
    ) -> TensorId:
        """A state behind the loop."""
        shape, before = self.shape(place) or (), self.graph.specs[self.loop.initial[place]].dtype
        if self.form == "columns":
            return prologue.cast(state_of(prologue, finals, dtype, len(shape), layout), dtype, before)
        state = state_of(prologue, finals, dtype, 2, layout)
        if len(shape) != 2 or self.form == "single":
            state = prologue.reshape(state, dtype, self.dims(prologue, shape))
        return prologue.cast(state, dtype, before)

    def dims(self, prologue: Prologue, shape: tuple[int | None, ...]) -> tuple[Dim, ...]:
        """The shape of a value of a step, in the form "numbers" or "single"."""
        return static(shape, "a value") if self.form == "single" else (prologue.batch, *static(shape[1:], "a value"))
