"""TfmemRecurrent on the CPU against the NumPy definition: values, wrong input, threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from custom_ops.expr.table import FLOAT_OPS
from custom_ops.load import Library, load
from custom_ops.recurrent import cells, reference
from custom_ops.recurrent.cell import Cell
from custom_ops.recurrent.cell_builder import CellBuilder
from tests import addons_cells
from tests.recurrent_cells import arguments, random_cells
from tests.recurrent_cells import library as cells_of
from tests.tf.python_server import run_python
from tests.tf.recurrent_calls import recurrent
from tests.tf.recurrent_tensors import Tensors, distance, distances, in_dtype, rounded, tensors_of
from tests.tiers import examples

# The largest error of a value over the largest value. In a short type, inputs and outputs alone are that far off.
TOLERANCE = {tf.float64: 1e-13, tf.float32: 5e-6, tf.half: 4e-3, tf.bfloat16: 3e-2}
SIZES = [(1, 3, 2), (7, 5, 1), (33, 4, 3), (64, 6, 5), (200, 9, 17), (1000, 2, 2)]  # units, time, batch


CELLS = tuple(cells_of(1))


@pytest.fixture(name="library", scope="module")
def fixture_library() -> Library:
    return load()


@pytest.fixture(name="vector_bytes", params=[64, 32, 16])
def fixture_vector_bytes(request: pytest.FixtureRequest, library: Library) -> Iterator[int]:
    library.limit_vector_bytes(request.param)
    yield request.param
    library.limit_vector_bytes(64)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", CELLS)
def test_values_are_those_of_the_definition(library: Library, name: str, dtype: tf.DType) -> None:
    for units, time, batch in SIZES:
        cell = cells_of(units)[name]
        given = rounded(tensors_of(cell, units, time, batch), dtype)
        for reverse in (False, True)[: 2 if dtype == tf.float32 else 1]:
            found = recurrent(library.ops, cell, units, *in_dtype(given, dtype), reverse=[reverse])
            expected = reference.run(cell, units, *given, reverse=reverse)
            bound = TOLERANCE[dtype]
            if dtype == tf.float32:  # what is ill-conditioned, NumPy gets no better
                rough = reference.run(
                    cell, units, *given.map(lambda tensor: tensor.astype(np.float32)), reverse=reverse
                )
                bound = max(bound, 3 * max(distances(rough, expected)))
            assert max(distances(found, expected)) < bound, (units, time, batch, reverse)


def test_every_instruction_set_computes_the_same(library: Library, vector_bytes: int) -> None:
    for name in ("lstm masked", "layer_norm_lstm"):
        for dtype in (tf.float32, tf.half, tf.bfloat16, tf.float64):
            cell = cells_of(70)[name]
            given = rounded(tensors_of(cell, 70, 5, 7), dtype)
            found, _ = recurrent(library.ops, cell, 70, *in_dtype(given, dtype))
            expected, _ = reference.run(cell, 70, *given)
            assert distance(found[0], expected[0]) < TOLERANCE[dtype], (vector_bytes, name, dtype)


def test_a_long_sequence_stays_accurate(library: Library) -> None:
    for units, batch in ((256, 3), (1000, 1)):
        cell = cells.lstm()
        given = rounded(tensors_of(cell, units, 100, batch), tf.float32)
        found, _ = recurrent(library.ops, cell, units, *in_dtype(given, tf.float32))
        expected, _ = reference.run(cell, units, *given)
        assert distance(found[0], expected[0]) < 1e-5


@hypothesis.given(
    cell=random_cells(),
    sizes=st.tuples(st.sampled_from([1, 3, 70, 130]), st.integers(0, 5), st.integers(0, 9)),
    reverse=st.lists(st.booleans(), min_size=1, max_size=2),
)
@hypothesis.settings(max_examples=examples(60), derandomize=True)
def test_cells_that_nobody_has_named(cell: Cell, sizes: tuple[int, int, int], reverse: list[bool]) -> None:
    given = tensors_of(cell, *sizes, directions=len(reverse))
    outputs, finals = recurrent(load().ops, cell, sizes[0], *given, reverse=reverse)
    for direction, flag in enumerate(reverse):
        part = arguments(cell, *sizes, seed=direction)
        expected, ends = reference.run(cell, sizes[0], *part, reverse=flag)
        for found, wanted in ((outputs, expected), (finals, ends)):
            for tensor, array in zip(found[direction * len(wanted) :], wanted, strict=False):
                assert distance(tensor, array) < 1e-11


def test_directions_are_independent(library: Library) -> None:
    cell = addons_cells.layer_norm_lstm(130)
    given = tensors_of(cell, 130, 6, 4, directions=2)
    outputs, finals = recurrent(library.ops, cell, 130, *given, reverse=[False, True])
    for direction in range(2):
        part = Tensors(*(half[direction * len(half) // 2 :][: len(half) // 2] for half in given))
        expected, ends = reference.run(cell, 130, *part, reverse=bool(direction))
        assert distance(outputs[direction], expected[0]) < 1e-13
        for state, end in enumerate(ends):
            assert distance(finals[direction * len(ends) + state], end) < 1e-13


@pytest.mark.parametrize(("time", "batch"), [(0, 3), (4, 0), (0, 0), (1, 1)])
@pytest.mark.parametrize("name", ["lstm", "gru canonical", "layer_norm_lstm"])
def test_nothing_to_do(library: Library, name: str, time: int, batch: int) -> None:
    cell = cells_of(40)[name]
    given = tensors_of(cell, 40, time, batch)
    outputs, finals = recurrent(library.ops, cell, 40, *given)
    expected, ends = reference.run(cell, 40, *given)
    for tensor, array in zip([*outputs, *finals], [*expected, *ends], strict=True):
        assert tensor.shape == array.shape
        np.testing.assert_allclose(tensor, array, rtol=1e-12)


def test_nan_and_infinity_stay_in_their_row_and_go_on(library: Library) -> None:
    cell = cells.lstm()
    given = rounded(tensors_of(cell, 50, 5, 4), tf.float32)
    given.sequences[0][2, 1, 7] = np.nan
    given.sequences[0][1, 2, 60] = np.inf
    given.states[1][3, 5] = -np.inf
    found, ends = recurrent(library.ops, cell, 50, *in_dtype(given, tf.float32))
    expected, finals = reference.run(cell, 50, *given)
    assert np.isnan(expected[0]).any()
    for tensor, array in zip([*found, *ends], [*expected, *finals], strict=True):
        assert distance(tensor, array) < 1e-5


def elementwise_cell(op: str, arguments: int) -> Cell:
    """One state, which no op reads, and op of columns of a sequence as the output."""
    builder = CellBuilder()
    columns = builder.sequence(3)
    state = builder.state()
    result = builder.apply(op, *columns[:arguments])
    return builder.build([state], [[result]])


@pytest.mark.parametrize("op", FLOAT_OPS)
def test_elementwise_ops_are_accurate_to_a_few_units_in_the_last_place(
    library: Library, vector_bytes: int, op: str
) -> None:
    random = np.random.default_rng(1)
    special = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-30, -1e-30, 88.0, -88.0, 104.0, 0.625, 1e30, 0.5]
    pairs = np.stack(np.meshgrid(special, special), -1).reshape(-1, 2)
    numbers = random.normal(size=(600, 2)) * 10.0 ** random.integers(-6, 2, size=(600, 2))
    both = np.concatenate([pairs, numbers]).astype(np.float32)
    a, b = both.T
    units = len(a)
    columns = np.concatenate([a, b, np.roll(b, 1)])
    count = FLOAT_OPS[op].arity
    cell = elementwise_cell(op, count)
    found, _ = recurrent(
        library.ops, cell, units, [columns[None, None]], [], [], [], [np.zeros([1, units], np.float32)]
    )
    with np.errstate(all="ignore"):
        expected = FLOAT_OPS[op].numpy(*columns.reshape(3, -1).astype(np.float64)[:count])
        limit = expected.astype(np.float32)
    found_values = found[0].numpy().reshape(-1)
    assert np.array_equal(np.isnan(found_values), np.isnan(limit))
    tiny = np.finfo(np.float32).tiny  # what is less may be flushed to zero, as TensorFlow's threads do
    finite = np.isfinite(limit)
    assert np.array_equal(found_values[~finite & ~np.isnan(limit)], limit[~finite & ~np.isnan(limit)])
    error = np.abs(found_values[finite] - expected[finite])
    allowed = FLOAT_OPS[op].ulps * np.spacing(np.abs(limit[finite])) + tiny
    worst = int(np.argmax(error / allowed))
    assert error[worst] <= allowed[worst], (
        columns.reshape(3, -1)[:count, finite][:, worst],
        found_values[finite][worst],
    )


# ---- wrong input ----


def wrong(library: Library, change: Callable[[dict[str, Any]], Any]) -> None:
    """Runs the op on an LSTM of 5 units, time 4, batch 3, after a change to its arguments."""
    cell = cells.lstm()
    given = in_dtype(tensors_of(cell, 5, 4, 3), tf.float32)
    arguments = {**given._asdict(), "No": 1, "cell": cell.to_text(), "units": 5}
    change(arguments)
    library.ops.tfmem_recurrent(**arguments)


def replaced(name: str, *shape: int) -> Callable[[dict[str, Any]], Any]:
    return lambda arguments: arguments[name].__setitem__(0, tf.zeros(shape))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced("sequences", 4), r"\[time, batch"),
        (replaced("sequences", 4, 3, 19), r"sequences\[0\].*\[4,3,19\].*expected \[4,3,20\]"),
        (replaced("matrices", 5, 15), r"matrices\[0\].*expected \[5,20\]"),
        (replaced("states", 2, 5), r"states\[0\].*expected \[3,5\]"),
        (lambda a: a.update(units=6), r"expected \[4,3,24\].*units 6"),
        (lambda a: a.update(units=0), "units"),
        (lambda a: a.update(No=2), "No is 2.*need 1"),
        (lambda a: a.update(directions=2), "Ns is 1; the cell and 2"),
        (lambda a: a.update(reverse=[True, False]), "reverse has 2 elements"),
        (lambda a: a.update(cell="cell 2\n"), "expected 'cell 1' on the first line, found 'cell 2'"),
        (lambda a: a.update(cell=a["cell"].replace("tanh", "tang")), "expected a node at line .*found 'tang'"),
        (
            lambda a: a.update(cell=a["cell"].replace("tanh", "logical_not")),
            "expected a node .*found 'logical_not'",
        ),
        (lambda a: a.update(cell=a["cell"].replace("state 1", "state 2")), "state 2 where there are 2"),
        (lambda a: a.update(cell=a["cell"].replace("product 4 ", "product 99 ")), "refers to 99"),
        (lambda a: a.update(precision="low"), "precision"),
        *(
            (lambda a, kind=kind: a.update(cell=a["cell"] + f"{kind} 4 4\n"), f"declares {kind} a second time")
            for kind in ("sequences", "invariants", "vectors", "matrices", "states")
        ),
        (
            lambda a: a.update(cell="cell 1\nsequences 2147483647\nsequence 0 2000000000\nsequences 1\nstates 0\n"),
            "declares sequences a second time",
        ),
        (lambda a: a.update(units=1 << 40), "units is 1099511627776; expected 1 to 2147483647"),
        (lambda a: a.update(directions=(1 << 62) + 1), "directions is 4611686018427387905; expected 1 to 64"),
    ],
)
def test_wrong_input_is_named(library: Library, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=message):
        wrong(library, change)
    with pytest.raises(
        (tf.errors.InvalidArgumentError, ValueError)
    ):  # shapes are also inferred, while a graph is built
        tf.function(lambda: wrong(library, change)).get_concrete_function()


def test_dtypes_do_not_mix(library: Library) -> None:
    with pytest.raises((tf.errors.InvalidArgumentError, TypeError, ValueError)):
        wrong(library, lambda a: a["states"].__setitem__(0, tf.zeros([3, 5], tf.float64)))
    with pytest.raises((tf.errors.NotFoundError, tf.errors.InvalidArgumentError, TypeError)):
        wrong(library, lambda a: a.update({k: [tf.cast(x, tf.int32) for x in a[k]] for k in Tensors._fields}))


def test_shapes_are_inferred(library: Library) -> None:
    cell = cells.lstm(mask="zero")

    @tf.function
    def run(x: tf.Tensor, mask: tf.Tensor, matrix: tf.Tensor, h: tf.Tensor) -> Any:
        return recurrent(library.ops, cell, 8, [x, mask], [], [], [matrix], [h, h])

    specs = [(None, None, 32), (None, 3), (8, 32), (None, 8)]
    graph = run.get_concrete_function(*(tf.TensorSpec(shape, tf.float32) for shape in specs))
    outputs, finals = graph.structured_outputs
    assert outputs[0].shape == [None, 3, 8]
    assert [final.shape for final in finals] == [[3, 8], [3, 8]]


# ---- threads ----


def test_two_threads_at_once(library: Library) -> None:
    cell = addons_cells.layer_norm_lstm(256)
    given = in_dtype(tensors_of(cell, 256, 30, 2), tf.float32)
    expected = recurrent(library.ops, cell, 256, *given)[0][0].numpy()

    def run(_: int) -> bool:
        return np.array_equal(recurrent(library.ops, cell, 256, *given)[0][0].numpy(), expected)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(40)))


def test_more_ops_at_once_than_threads(library: Library) -> None:
    cell = cells.lstm()
    given = in_dtype(tensors_of(cell, 256, 20, 1), tf.float32)

    @tf.function
    def run() -> list[tf.Tensor]:
        return [recurrent(library.ops, cell, 256, *given, reverse=[i % 2 == 1])[0][0] for i in range(12)]

    results = [tensor.numpy() for tensor in run()]
    for i, result in enumerate(results):
        np.testing.assert_array_equal(result, results[i % 2])


SCRIPT = """
import hashlib, sys
import numpy as np, tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(int(sys.argv[1]))
from custom_ops.recurrent import cells
from custom_ops.load import load
from tests.tf.recurrent_calls import recurrent
from tests import addons_cells
digest = hashlib.sha256()
random = np.random.default_rng(0)
for cell, units, batch in ((addons_cells.layer_norm_lstm(300), 300, 11), (cells.lstm(), 64, 50)):
    shapes = [[(7, batch, 4 * units)], [], [(n * units,) for n in cell.vectors], [(units, 4 * units)]]
    shapes.append([(batch, units)] * 2)
    given = [[random.normal(size=s, scale=0.1).astype("float32") for s in kind] for kind in shapes]
    for _ in range(2):
        outputs, finals = recurrent(load().ops, cell, units, *given, training=True)
        digest.update(b"".join(tensor.numpy().tobytes() for tensor in [*outputs, *finals]))
print(digest.hexdigest())
"""


def test_results_do_not_depend_on_the_threads() -> None:
    found = set()
    for threads in (1, 2, 5):
        run = run_python(["-c", SCRIPT, str(threads)])
        assert run.returncode == 0, run.stderr
        found.add(run.stdout.split()[-1])
    assert len(found) == 1


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: dtype.name)
def test_where_there_is_one_unit_vectors_are_of_rows(library: Library, vector_bytes: int, dtype: tf.DType) -> None:
    for batch in (1, 19, 530):
        for name in ("gru canonical", "layer_norm_lstm"):
            cell = cells_of(1)[name]
            given = rounded(tensors_of(cell, 1, 6, batch), dtype)
            found, ends = recurrent(library.ops, cell, 1, *in_dtype(given, dtype))
            expected, finals = reference.run(cell, 1, *given)
            error = max(distances((found, ends), (expected, finals)))
            assert error < TOLERANCE[dtype], (vector_bytes, name, batch)
