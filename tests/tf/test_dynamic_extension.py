"""The extension module: recorded graphs are the integers that their definition says, and nothing is kept or lost."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import pickle
import sys
import threading
import weakref

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from custom_ops._extension import KindNumbers, RecordedOp, use_operators
from tests.tiers import examples
from tfmem import dynamic
from tfmem.dynamic import expressions
from tfmem.dynamic.batch import from_bytes
from tfmem.dynamic.recorded import RecordedKinds
from tfmem.dynamic.recorder import Recorder


def flatten(losses: list[dynamic.Expression], variables: list[tf.Variable]) -> tuple[list, list, list]:
    """The definition: of each graph kinds, children and arguments, kinds numbered as they are met."""
    numbers: dict = {}
    rows = []
    for loss in losses:
        places: dict[dynamic.Expression, int] = {}
        waiting = [loss]
        while waiting:
            current = waiting.pop()
            if current not in places:
                places[current] = len(places)
                waiting += current.values
        order = list(reversed(places))
        last = len(order) - 1
        keys = [
            (
                op.measured.operation,
                tuple(next(i for i, v in enumerate(variables) if v is variable) for variable in op.variables),
                tuple(value.width for value in op.values),
            )
            for op in order
        ]
        kinds = [numbers.setdefault(key, len(numbers)) for key in [*keys, "loss"]]
        children = [last - places[value] for op in order for value in op.values]
        rows.append((kinds, [*children, last], [integer for op in order for integer in op.integers]))
    return tuple(map(list, zip(*rows, strict=True)))


def lists(kinds: RecordedKinds, losses: list[dynamic.Expression]) -> tuple[list, list, list]:
    return tuple(column.to_list() for column in from_bytes(kinds.flatten(losses)))


@pytest.fixture(scope="module")
def variables() -> list[tf.Variable]:
    shapes = [(4,), (1,), (5, 4), (4, 4), (4, 5)]
    return [tf.Variable(tf.ones(shape)) for shape in shapes]


def vectors_of_four(draw, variables, a, b, one) -> list:
    """What makes a vector of four numbers of two such vectors and a number."""
    _, _, table, square, _ = variables
    first, second = dynamic.split(a, 2)
    return [
        lambda: a * b,
        lambda: a + one,
        lambda: 2.0 - a,
        lambda: -a,
        lambda: dynamic.tanh(a),
        lambda: dynamic.select(a, b, a),
        lambda: dynamic.concat([second, first]),
        lambda: dynamic.concat(dynamic.split(b, [1, 3])[::-1]),
        lambda: dynamic.matvec(square, a),
        lambda: dynamic.matmul(a, square),
        lambda: dynamic.embedding_lookup(table, draw(st.integers(0, 4))),
        lambda: dynamic.dropout(a, 0.5),
        lambda: dynamic.softmax(a),
    ]


def random_graph(draw, variables: list[tf.Variable], ops: int) -> dynamic.Expression:
    """Values of four numbers and of one, each of any of those before, so that some are shared and some are dead."""
    fours, ones = [dynamic.vector(variables[0])], [dynamic.vector(variables[1])]
    for _ in range(ops):
        a, b, one = (draw(st.sampled_from(known)) for known in (fours, fours, ones))
        fours.append(draw(st.sampled_from(vectors_of_four(draw, variables, a, b, one)))())
        ones.append(draw(st.sampled_from([dynamic.reduce_sum, dynamic.reduce_max]))(a))
        ones.append(dynamic.sparse_softmax_cross_entropy(draw(st.integers(0, 3)), b))
    return dynamic.add_n([draw(st.sampled_from(ones)), draw(st.sampled_from(ones)), dynamic.reduce_sum(fours[-1])])


@settings(max_examples=examples(60))
@given(data=st.data())
def test_graphs_are_what_the_definition_says(variables, data) -> None:
    losses = [random_graph(data.draw, variables, data.draw(st.integers(0, 8))) for _ in range(3)]
    losses.append(losses[0])
    assert lists(RecordedKinds(variables), losses) == flatten(losses, variables)


def test_a_long_chain_is_read_and_given_back(variables) -> None:
    x, count = dynamic.vector(variables[1]), 200_000
    for _ in range(count // 2):
        x = dynamic.tanh(x) * x
    rows = lists(RecordedKinds(variables), [x])
    assert len(rows[0][0]) == count + 2
    same = rows == flatten([x], variables)
    assert same
    before = sys.getrefcount(variables[1])  # not in an assertion, for which pytest takes references
    del x
    after = sys.getrefcount(variables[1])
    assert after == before - 1


def test_a_chain_of_a_subclass_is_given_back(variables) -> None:
    class Own(dynamic.Expression):
        pass

    x = dynamic.vector(variables[1])
    for _ in range(20_000):
        x = Own(1, values=(dynamic.tanh(x),))
    assert dynamic.tanh(x).values == (x,)
    del x


def test_what_is_recorded_is_freed_at_once(variables) -> None:
    def record() -> None:
        x = dynamic.vector(variables[0])
        a, b = dynamic.split(dynamic.tanh(x * 2.0) + 1, 2)
        y = dynamic.matvec(variables[3], dynamic.concat([b, a]))
        z = dynamic.add(y, dynamic.embedding_lookup(params=variables[2], ids=np.int64(2)))
        kinds.flatten([dynamic.sparse_softmax_cross_entropy(labels=1, logits=z)])
        with pytest.raises(dynamic.DynamicError, match="out of range"):
            dynamic.embedding_lookup(variables[2], 7)
        with pytest.raises(dynamic.DynamicError, match="vectors of 4 and 2"):
            x + a
        with pytest.raises(TypeError):
            x * None

    kinds = RecordedKinds(variables)
    measured = dynamic.vector(variables[0]).measured
    for _ in range(3):
        record()
    gc.collect()
    counts = [sys.getrefcount(each) for each in (*variables, measured, dynamic.Expression)]
    blocks = []
    for _ in range(5):
        for _ in range(50):
            record()
        gc.collect()
        blocks.append(sys.getallocatedblocks())
    assert [sys.getrefcount(each) for each in (*variables, measured, dynamic.Expression)] == counts
    growth = min(after - before for before, after in itertools.pairwise(blocks))
    assert growth < 50, "of 50 times"


def test_the_collector_follows_what_can_be_in_a_cycle(variables) -> None:
    class Measured:
        width, bounds = 1, ()

    recorder = Recorder((), [])
    recorder.expression = dynamic.Expression(1, recorder, 0)
    op = RecordedOp(Measured, (), ())
    op.itself = recorder.op = op
    measured, numbers = Measured(), KindNumbers()
    numbers.flatten([dynamic.Expression(1, None, -1, measured)], lambda _: 0)
    measured.numbers = numbers
    gone = [weakref.ref(recorder), weakref.ref(measured)]
    assert gc.is_tracked(recorder.expression)
    assert not gc.is_tracked(dynamic.vector(variables[0])), "a collector that follows them takes longer than all else"
    del recorder, measured, numbers, op
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


class Variable:
    """As an op sees one."""

    def __init__(self, width: int) -> None:
        self.width, self.bounds = width, ()


def test_no_op_keeps_a_variable_or_takes_another_for_it() -> None:
    calls: list[int] = []

    def measure(variable: Variable) -> dynamic.Expression:
        calls.append(id(variable))
        return dynamic.Expression(variable.width, None, -1, object(), (variable,))

    op = RecordedOp(measure, ("variable",), ("variable",))
    for width in range(100):
        variable = Variable(width)
        assert op(variable).width == op(variable).width == width
        gone = weakref.ref(variable)
        del variable
        assert gone() is None
    assert len(calls) == 100
    assert len(set(calls)) < 100, "no place in memory was used again, so nothing was tested"


def test_more_constants_than_are_remembered(variables) -> None:
    x = dynamic.vector(variables[1])
    first = dynamic.constant(0.5)
    for number in range(5000):
        dynamic.constant(number)
    again = x * 0.5
    assert again.values[1].measured.operation == first.measured.operation
    kinds = RecordedKinds(variables)
    assert lists(kinds, [x * first, again]) == flatten([x * first, again], variables)


def test_numbers_of_any_kind_are_operands(variables) -> None:
    x = dynamic.vector(variables[1])
    losses = [x * 2.0, x * 2, x * np.float32(2), x * tf.constant(2.0), np.float64(2) * x, dynamic.multiply(x, "2")]
    rows = lists(RecordedKinds(variables), losses)
    assert rows[0][0] == rows[0][1] == rows[0][2] == rows[0][3] == rows[0][5]
    assert rows == flatten(losses, variables)
    assert (2 - x).values[1] is x
    assert (x - 2).values[0] is x


def test_a_known_op_still_refuses_what_it_cannot_take(variables) -> None:
    table = variables[2]
    assert dynamic.embedding_lookup(table, 4).integers == (4,)
    for wrong in (5, -1, 10**30, np.int64(5)):
        with pytest.raises(dynamic.DynamicError, match=f"lookup: {wrong} is out of range; expected 0 to 4"):
            dynamic.embedding_lookup(table, wrong)
    assert dynamic.embedding_lookup(table, 0).integers == (0,)
    with pytest.raises(TypeError, match="positional argument"):
        dynamic.embedding_lookup(table, 0, 0)
    with pytest.raises(TypeError, match="multiple values"):
        dynamic.embedding_lookup(table, params=table)
    with pytest.raises(TypeError, match="unexpected keyword"):
        dynamic.embedding_lookup(table, number=1)


def test_a_known_op_of_a_node_kind_is_written_there(variables) -> None:
    square, x = variables[3], dynamic.vector(variables[0])
    dynamic.matvec(square, x)
    recorder = Recorder((square,), [])
    inside = expressions.expression_at(recorder, recorder.builder.constant(1.0))
    assert (inside * 2).recorder is recorder
    with pytest.raises(dynamic.DynamicError, match="belong to different node kinds"):
        inside + dynamic.Expression(1, Recorder((), []), 0)
    assert (x * 2).recorder is None


def test_an_error_of_python_leaves_all_usable(variables) -> None:
    class FaultError(Exception):
        pass

    def fail(_):
        raise FaultError

    x = dynamic.vector(variables[1])
    numbers = KindNumbers()
    with pytest.raises(FaultError):
        numbers.flatten([x], fail)
    for wrong in ("1", -1, 1 << 40):
        with pytest.raises((TypeError, ValueError)):
            numbers.flatten([x], lambda _, wrong=wrong: wrong)
    with pytest.raises(TypeError, match="expected an expression"):
        numbers.flatten([3], lambda _: 0)
    with pytest.raises(OverflowError):
        numbers.flatten([dynamic.Expression(1, measured=x.measured, integers=(1 << 31,))], lambda _: 0)
    columns = numbers.flatten([x], lambda given: 0 if given is x else 1)
    assert [np.frombuffer(values, np.int32).tolist() for values, _ in columns] == [[0, 1], [0], []]
    for names, roles in (((), ("value",)), (("a",), ("no role",)), (("a",), (1,)), (tuple("abcde"), ("value",) * 5)):
        with pytest.raises(ValueError, match="role"):
            RecordedOp(fail, names, roles)
    with pytest.raises(TypeError):
        use_operators(*[fail] * 6)
    with pytest.raises(TypeError, match="expected expressions"):
        dynamic.Expression(1, values=(3,))


def test_a_variable_of_another_net_is_named(variables) -> None:
    kinds = RecordedKinds(variables[:1])
    good, bad = (dynamic.reduce_sum(dynamic.vector(variable)) for variable in variables[:2])
    for _ in range(2):
        with pytest.raises(dynamic.DynamicError, match="which is none of the 1 parameters"):
            kinds.flatten([good, bad])
    assert lists(kinds, [good])[1] == [[0, 1]]


def test_threads_record_and_read_one_graph(variables) -> None:
    shared = dynamic.vector(variables[1])
    for _ in range(300):
        shared = dynamic.tanh(shared) * shared
    expected = lists(RecordedKinds(variables), [shared + 1.0])
    found: list = []

    def work() -> None:
        own = RecordedKinds(variables)
        found.extend(lists(own, [shared + 1.0]) == expected for _ in range(20))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert found == [True] * 80


def test_functions_are_what_they_were_in_python() -> None:
    assert str(inspect.signature(dynamic.matvec)) == "(a: 'tf.Variable', b: 'Expression') -> 'Expression'"
    assert list(inspect.signature(dynamic.tanh).parameters) == ["values"]
    assert "tf.linalg.matvec" in dynamic.matvec.__doc__
    assert dynamic.matvec.__name__ == "matvec"
    assert pickle.loads(pickle.dumps(dynamic.matvec)) is dynamic.matvec
    assert copy.copy(dynamic.tanh) is dynamic.tanh
    with pytest.raises(AttributeError, match=r"module 'tfmem.dynamic' has no attribute 'nothing'"):
        _ = dynamic.nothing


def test_an_expression_shows_its_fields(variables) -> None:
    x = dynamic.vector(variables[0])
    assert (x.width, x.shape, x.place, x.recorder, x.values, x.integers) == (4, (4,), -1, None, (), ())
    assert x.variables[0] is variables[0]
    assert x != dynamic.vector(variables[0])
    assert len({x, x, dynamic.vector(variables[0])}) == 2
    assert repr(dynamic.Expression(3)) == (
        "Expression(width=3, recorder=None, place=-1, measured=None, variables=(), values=(), integers=())"
    )
    copied = copy.copy(dynamic.tanh(x))
    assert (copied.width, copied.values, copied.measured) == (4, (x,), dynamic.tanh(x).measured)
    with pytest.raises(AttributeError):
        x.width = 5
