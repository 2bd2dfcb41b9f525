"""The cell language and its builder."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings

from custom_ops.errors import CellError
from custom_ops.expr.nodes import Elementwise
from custom_ops.recurrent import cells
from custom_ops.recurrent.cell import Cell, CellConstant, Product, RowSum, Sequence, State, Term, Vector, from_text
from custom_ops.recurrent.cell_builder import CellBuilder
from tests import addons_cells
from tests.recurrent_cells import library, random_cells
from tests.tiers import examples


@pytest.mark.parametrize("name", library(4))
def test_text_reads_back_as_the_same_cell(name: str) -> None:
    cell = library(4)[name]
    assert from_text(cell.to_text()) == cell


@given(random_cells())
@settings(max_examples=examples(30))
def test_text_of_any_cell_reads_back(cell: Cell) -> None:
    assert from_text(cell.to_text()) == cell


def test_constants_survive_the_text() -> None:
    values = [0.1, -0.0, 1e-300, float("inf"), -float("inf"), float("nan")]
    nodes = (State(0), *map(CellConstant, values))
    cell = from_text(Cell(nodes, states=(0,), outputs=((1,),)).to_text())
    assert [repr(node.value) for node in cell.nodes if isinstance(node, CellConstant)] == [
        repr(value) for value in values
    ]


def test_stages_count_synchronisations() -> None:
    """GRNN, section 5: one for LSTM, two for canonical GRU, one for the GRU that resets after the product."""
    assert max(cells.lstm().stages) == 0
    assert max(cells.gru(reset_after=True).stages) == 0
    assert max(cells.gru(reset_after=False).stages) == 1
    # product, mean and variance of the gates, mean and variance of c
    assert max(addons_cells.layer_norm_lstm(8).stages) == 4


def test_blocks_count_weights_once() -> None:
    assert [cell.blocks for cell in (cells.lstm(), cells.gru(), addons_cells.nas())] == [4, 3, 8]
    builder = CellBuilder(matrices=[(1, 1)])
    h = builder.state()
    twice = builder.product(builder.apply("tanh", builder.product(h, 0)), 0)
    assert builder.build([twice], [[h]]).blocks == 1


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ((State(0), Elementwise("add", (0, 1))), "earlier ones only"),
        ((State(0), Elementwise("add", (0,))), "unknown op 'add', or not with 1"),
        ((State(0), Elementwise("tan", (0,))), "unknown op 'tan'"),
        ((State(0), State(1)), "state 1 of 1"),
        ((State(0), Sequence(0)), "sequence 0 of 0"),
        ((State(0), Vector(0, 2)), "column 2 of 2"),
        ((State(0), Product(())), "without terms"),
        ((State(0), Product((Term(0, 0, 1),))), "row 1 of 1"),
        ((State(0), CellConstant(1.0), RowSum(1)), "not a scalar"),
    ],
)
def test_a_malformed_cell_is_refused(nodes: tuple[object, ...], words: str) -> None:
    with pytest.raises(CellError, match=words):
        Cell(nodes, states=(0,), outputs=((0,),), vectors=(2,), matrices=((1, 1),))  # type: ignore[arg-type]


def test_states_and_outputs_are_checked() -> None:
    with pytest.raises(CellError, match="refers to node 1"):
        Cell((State(0),), states=(1,), outputs=())
    with pytest.raises(CellError, match="a state became a scalar"):
        Cell((State(0), CellConstant(1.0)), states=(1,), outputs=())
    with pytest.raises(CellError, match="one scalar, or columns"):
        Cell((State(0), CellConstant(1.0)), states=(0,), outputs=((0, 1),))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cell 2\n",
        "cell 1\nsinh 0\n",
        "cell 1\nstate x\n",
        "cell 1\nmatrices 1\n",
        "cell 1\nmatrices\nmatrices\n",
    ],
)
def test_text_that_is_no_cell_is_refused(text: str) -> None:
    with pytest.raises(CellError):
        from_text(text)


def test_ops_of_cells_in_saved_models_keep_their_names() -> None:
    """A SavedModel holds a cell as text: these names were written, and stay."""
    unary = "negate absolute sign square sqrt reciprocal_sqrt reciprocal exp log log1p expm1 erf erfc sin cos sigmoid "
    unary += "tanh relu softplus elu relu6 selu softsign sinh cosh"
    binary = (
        "add subtract multiply divide maximum minimum power multiply_no_nan divide_no_nan xdivy squared_difference "
    )
    binary += "greater greater_equal equal"
    lines = [f"{name} 0" for name in unary.split()] + [f"{name} 0 1" for name in binary.split()] + ["select 0 1 2"]
    head = "cell 1\nsequences 2\ninvariants\nvectors\nmatrices\nsequence 0 0\nsequence 0 1\nstate 0\n"
    text = head + "\n".join(lines) + "\nstates 2\noutput 3\n"
    assert len(lines) == 40
    assert from_text(text).to_text() == text


def test_ops_on_booleans_are_none_of_a_cell() -> None:
    with pytest.raises(CellError, match="logical_not"):
        from_text("cell 1\nsequences 1\nsequence 0 0\nlogical_not 0\nstates\noutput 1\n")
    builder = CellBuilder()
    columns = builder.sequence(1)
    with pytest.raises(CellError, match="unknown op 'logical_not'"):
        builder.build([], [[builder.apply("logical_not", *columns)]])


def test_the_builder_computes_a_value_once() -> None:
    builder = CellBuilder()
    x, h = (*builder.sequence(1), builder.state())
    assert builder.apply("add", x, h) == builder.apply("add", h, x)
    assert builder.apply("subtract", x, h) != builder.apply("subtract", h, x)
    assert builder.constant(1) == builder.constant(1.0)
    assert builder.constant(0.0) != builder.constant(-0.0)
    assert builder.row_sum(x) == builder.row_sum(x)


def test_the_builder_leaves_out_what_nothing_reads() -> None:
    builder = CellBuilder()
    x, y = builder.sequence(2)
    h = builder.state()
    builder.apply("exp", y)
    cell = builder.build([builder.apply("add", x, h)], [[h]])
    assert cell.nodes == (Sequence(0, 0), State(0), Elementwise("add", (0, 1)))
    assert cell.sequences == (2,)


def test_the_builder_refuses_what_is_not_there() -> None:
    builder = CellBuilder()
    h = builder.state()
    with pytest.raises(CellError, match="reads a node that does not exist"):
        builder.apply("tanh", 5)
    with pytest.raises(CellError, match="declare it first"):
        builder.add(Sequence(0))
    with pytest.raises(CellError, match="1 states were declared, and 0 given"):
        builder.build([], [[h]])
    with pytest.raises(CellError, match="no activation 'swoosh'; there are linear"):
        cells.lstm("swoosh")


def test_a_hash_does_not_travel() -> None:
    """Hashes of texts differ between processes."""
    cell = cells.lstm()
    assert hash(cell) == hash(cells.lstm())
    assert "_hash" not in cell.__getstate__()
    assert pickle.loads(pickle.dumps(cell)) == cell
