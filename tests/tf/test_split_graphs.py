"""Training steps of `tf.compat.v1` sessions on pieces of the batch: values, streams, budgets, what else is fetched."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.errors import AlreadyOptimizedError
from graph_passes.refusals import Reason
from tests.tf.memory_in_use import in_use
from tests.tf.split_steps import close
from tfmem.frontends import live_split
from tfmem.runtime.device_memory import DeviceMemory

v1 = tf.compat.v1
MIB = 1 << 20
SGD, MOMENTUM, ADAM = (
    lambda: v1.train.GradientDescentOptimizer(0.1),
    lambda: v1.train.MomentumOptimizer(0.05, 0.9),
    lambda: v1.train.AdamOptimizer(0.01),
)


def weights(name: str, shape: Sequence[int], resource: bool) -> Any:
    seed = sum(map(ord, name))
    return v1.get_variable(name, shape, initializer=v1.glorot_uniform_initializer(seed=seed), use_resource=resource)


def convolutions(x: Any, resource: bool) -> Any:
    """Four convolutions and their mean."""
    for place in range(4):
        w = weights(f"conv{place}", (3, 3, x.shape[-1], 8), resource)
        bias = v1.get_variable(f"bias{place}", [8], initializer=v1.zeros_initializer(), use_resource=resource)
        x = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "SAME"), bias), name=f"relu{place}")
    return tf.reduce_mean(x, [1, 2]) @ weights("head", (8, 5), resource)


def dense(x: Any, resource: bool) -> Any:
    """Wide layers, with dropout, whose numbers are those of the whole batch."""
    x = tf.reshape(x, [tf.shape(x)[0], -1])
    for place in range(3):
        width = 2048 if place < 2 else 64
        x = tf.nn.relu(x @ weights(f"dense{place}", (int(x.shape[-1]), width), resource), name=f"relu{place}")
        if place == 1:
            x = v1.nn.dropout(x, rate=0.2, seed=3)
    return x @ weights("head", (64, 5), resource)


@pytest.fixture(autouse=True)
def fixture_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is in use before: what earlier tests left in memory would hide the variables, which are not made yet."""
    monkeypatch.setattr(DeviceMemory, "in_use", 0)


class Program:
    """The graph of a TensorFlow 1 program: a loss and a metric, a step, and a saver.

    Attributes:
        graph: the graph.
        fed: what a step is fed.
    """

    def __init__(
        self,
        net: Callable[[Any, bool], Any] = convolutions,
        optimizer: Callable[[], Any] = ADAM,
        shape: tuple[int, ...] = (64, 32, 32, 2),
        batch: int | None = 64,
        resource: bool = True,
        reads: bool = False,
    ) -> None:
        draw, self.graph = np.random.default_rng(0), tf.Graph()
        self.fed = {"x:0": draw.normal(size=shape).astype("float32"), "y:0": np.arange(shape[0]) % 5}
        with self.graph.as_default():
            v1.set_random_seed(7)
            if reads:  # an iterator, in an order that differs from step to step
                data = tf.data.Dataset.from_tensor_slices(tuple(self.fed.values())).shuffle(shape[0], seed=1).repeat()
                x, y = v1.data.make_one_shot_iterator(data.batch(shape[0], drop_remainder=True)).get_next()
                self.fed = {}
            else:
                x = v1.placeholder(tf.float32, [batch, *shape[1:]], name="x")
                y = v1.placeholder(tf.int64, [batch], name="y")
            logits = tf.identity(net(x, resource), name="logits")
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits), name="loss")
            tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), y), tf.float32), name="right")
            optimizer().minimize(loss, name="train")
            self.variables = [variable.name for variable in v1.global_variables()]
            v1.global_variables_initializer()
            self.saver = v1.train.Saver()

    def session(self) -> Any:
        session = v1.Session(graph=self.graph, config=tfmem.session_config())
        session.run("init")
        return session

    def values(self, session: Any) -> list[Any]:
        reads = [f"{name[:-2]}/Read/ReadVariableOp:0" for name in self.variables]
        names = {op.name for op in self.graph.get_operations()}
        return session.run([a if a[:-2] in names else b for a, b in zip(reads, self.variables, strict=True)])

    def save(self, session: Any, path: Path) -> str:
        with self.graph.as_default():
            return str(self.saver.save(session, str(path)))

    def restore(self, session: Any, path: str) -> None:
        with self.graph.as_default():
            self.saver.restore(session, path)

    def trained(self, what: Sequence[str] = ("loss:0", "right:0", "logits:0"), steps: int = 4) -> tuple[list[Any], int]:
        """What steps return and leave in variables; and the most bytes that a step and its variables took."""
        library, found, peak, others = tfmem.load_ops(), [], 0, in_use()
        with closing(self.session()) as session:
            for _ in range(steps):
                library.stats(reset=True)
                found += session.run([*what, "train"], self.fed)[:-1]
                peak = max(peak, int(library.stats()[1]) - others)
            found += self.values(session)
        return found, peak


def divided(program: Program, budget: int, fetches: Sequence[str] = (), **options: Any) -> Any:
    """The report of a program whose step was split."""
    assert tfmem.optimize(program.graph, memory_budget=budget, fetches=fetches, **options) is program.graph
    report = tfmem.report(program.graph)
    assert report.splits
    assert "equal to rounding" in report.splits[0].exactness
    assert "split along the batch" in str(report)
    assert report.peak_predicted <= budget < report.peak_before
    return report


CASES = {
    "convolutions": ((convolutions, ADAM), 3),
    "reference variables": ((convolutions, MOMENTUM, (64, 32, 32, 2), 64, False), 3),
    "odd batch": ((convolutions, SGD, (61, 32, 32, 2), 61), 3),
    "dense": ((dense, SGD, (4096, 4, 4, 4), 4096), 90),
    "iterator": ((convolutions, SGD, (64, 32, 32, 2), 64, True, True), 3),
}
NAMED = ("loss", "right", "logits", "train")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fetches", [(), NAMED], ids=["by updates", "named"])
@pytest.mark.parametrize("case", CASES)
def test_a_session_trains_in_pieces(case: str, fetches: tuple[str, ...]) -> None:
    """What steps return, what they leave in variables, and what they take; masks of dropout are those of the batch."""
    arguments, mib = CASES[case]
    expected, before = Program(*arguments).trained()
    program, budget = Program(*arguments), mib * MIB
    divided(program, budget, fetches)
    found, peak = program.trained()
    close(found, expected, 1e-4)
    assert peak <= budget < before


@pytest.mark.parametrize("fetches", [(), (*NAMED, "relu1")], ids=["by updates", "named"])
def test_an_evaluation_trains_nothing(fetches: tuple[str, ...]) -> None:
    """Whole tensors of the batch, also of what only pieces hold in a step; no variable is written for them."""
    given, program = Program(), Program()
    divided(program, 5 * MIB if fetches else 3 * MIB, fetches)
    wanted = ["loss:0", "right:0", "logits:0", "relu1:0"]
    with closing(given.session()) as plain, closing(program.session()) as session:
        for name in wanted:
            before = program.values(session)
            found = session.run(name, program.fed)
            np.testing.assert_allclose(found, plain.run(name, given.fed), rtol=1e-5, atol=1e-5)
            for one, other in zip(program.values(session), before, strict=True):
                np.testing.assert_array_equal(one, other)
        assert session.run("relu1:0", program.fed).shape == (64, 32, 32, 8)
        session.run("train", program.fed)
        assert not np.array_equal(program.values(session)[0], before[0])


def test_a_step_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    given, program = Program(), Program()
    divided(program, 3 * MIB)
    with closing(given.session()) as plain, closing(program.session()) as session:
        plain.run("train", given.fed)
        program.restore(session, given.save(plain, tmp_path / "saved"))
        close(program.values(session), given.values(plain), 0.0)
        for _ in range(3):
            losses = [each.run(["loss:0", "train"], given.fed)[0] for each in (session, plain)]
            close(losses[:1], losses[1:], 1e-4)
        close(program.values(session), given.values(plain), 1e-4)
        session.run("init")
        given.restore(plain, program.save(session, tmp_path / "again"))
        close([session.run("loss:0", program.fed)], [plain.run("loss:0", given.fed)], 1e-5)


def test_another_batch_and_another_split_are_refused() -> None:
    """By TensorFlow, where the graph says how many examples there are; else by tfmem, which leaves the graph alone."""
    program = Program()
    divided(program, 3 * MIB)
    with pytest.raises(AlreadyOptimizedError):
        tfmem.optimize(program.graph, memory_budget=8 * MIB)
    with closing(program.session()) as session, pytest.raises(ValueError, match="Cannot feed value of shape"):
        session.run("train", {name: value[:32] for name, value in program.fed.items()})
    program = Program(batch=None)
    given, shapes = program.graph.as_graph_def(), {"x": (64, 32, 32, 2), "y": (64,)}
    with pytest.raises(tfmem.InfeasibleBudgetError) as caught:
        tfmem.optimize(program.graph, memory_budget=3 * MIB, input_shapes=shapes)
    assert str(Reason.SPLIT_OPEN(names="x, y")) in str(caught.value)
    assert program.graph.as_graph_def() == given


def test_what_cannot_be_split_is_left_alone() -> None:
    program = Program()
    given = program.graph.as_graph_def()
    whys = (Reason.SPLIT_NEVER, Reason.SPLIT_OVER, Reason.SPLIT_CHUNKS)
    for why, mib, split in zip(whys, (3, 0.6, 0.6), ("never", "auto", "auto"), strict=True):
        offload = tfmem.OffloadOptions(split=split)
        with pytest.raises(tfmem.InfeasibleBudgetError) as caught:
            tfmem.optimize(program.graph, memory_budget=int(mib * MIB), offload=offload)
        parts = string.Formatter().parse(why.sentence)
        assert all(words in str(caught.value) for words, *_ in parts)
    assert program.graph.as_graph_def() == given


def test_updates_that_an_evaluation_would_run_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the planned order does without the edges that keep updates behind what is evaluated."""
    monkeypatch.setattr(live_split, "_waits", lambda *_: [])
    arguments, mib = CASES["dense"]
    program = Program(*arguments)
    given = program.graph.as_graph_def()
    with pytest.raises(tfmem.InfeasibleBudgetError) as caught:
        tfmem.optimize(program.graph, memory_budget=mib * MIB, fetches=NAMED)
    assert all(words in str(caught.value) for words, *_ in string.Formatter().parse(Reason.SPLIT_UPDATES.sentence))
    assert program.graph.as_graph_def() == given
