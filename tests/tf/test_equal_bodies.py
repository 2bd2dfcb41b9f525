"""Bodies that are equal but for names are planned once."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import tfmem
from tests.tf.stitched_steps import close, optimized, require_stitched, values
from tfmem.capture.captured_source import _BodySource
from tfmem.steps import after_grappler

X = tf.random.stateless_normal([6, 4, 8], [1, 2])
LENGTHS = tf.constant([6, 3])


@pytest.fixture(name="planned")
def fixture_planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The sources that were planned."""
    found: list[Any] = []
    plan = after_grappler._stitched

    def counted(source: Any, *given: Any) -> Any:
        found.append(source)
        return plan(source, *given)

    monkeypatch.setattr(after_grappler, "_stitched", counted)
    return found


class Net:
    """Six steps, each of which a condition may leave out, trained by gradient descent.

    Attributes:
        noise: what each step adds, drawn by an op with a seed.
        different: a step that does something else.
    """

    def __init__(self, noise: float = 0.0, different: int = -1) -> None:
        self.noise, self.different = noise, different
        self.variables = [tf.Variable(tf.random.stateless_normal([8, 8], [3, 4]) / 3)]
        self.step = tf.function(self.run)

    def run(self, x: Any, length: Any) -> Any:
        kernel = self.variables[0]
        with tf.GradientTape() as tape:
            state = x[0]
            for time in range(6):
                row = x[time]
                state = tf.cond(
                    length > time, lambda s=state, r=row, t=time: self.one(s, r, t, kernel), lambda s=state: s
                )
            loss = tf.reduce_mean((state - 0.5) ** 2)
        kernel.assign_sub(0.3 * tape.gradient(loss, kernel))
        return loss

    def one(self, state: Any, x: Any, time: int, kernel: Any) -> Any:
        if self.noise:
            x += self.noise * tf.random.normal([4, 8], seed=5)
        mixed = tf.tanh(tf.sigmoid(state @ kernel + x) * 2.0 - 1.0)
        return tf.exp(-mixed) * x if time == self.different else mixed * x + state


def regions_of(report: tfmem.Report) -> dict[str, int]:
    """How many ops the regions in bodies hold, by their names."""
    return {region.name: sum(len(s.ops) for s in region.steps) for region in report.regions if "/" in region.name}


@pytest.mark.parametrize("different", [-1, 2])
def test_equal_branches(planned: list[Any], different: int) -> None:
    plain, net = Net(different=different), Net(different=different)
    step = optimized(net.step)
    for _ in range(3):
        for length in LENGTHS:
            close(step(X, length), plain.step(X, length))
    close(values(net.variables), values(plain.variables))
    report = require_stitched(step)
    found = regions_of(report)
    assert len([name for name in found if name.startswith("cond") and "then" in name]) == 6, found
    assert len([name for name in found if name.startswith("gradient_tape")]) >= 5, found
    named = {name for region in report.regions for s in region.steps for name, _ in s.ops}
    for number in ("", "_1", "_5"):
        tanh = [name for name in named if name.startswith(f"cond{number}/then/cond{number}/Tanh")]
        assert len(tanh) == 1, named
        assert f"is in region 'cond{number}/then/fusion_0'" in tfmem.explain(step, tanh[0])
    bodies = [source for source in planned if isinstance(source, _BodySource)]
    assert len({source.structure for source in bodies}) == len(bodies), "none twice"
    assert len(bodies) <= (8 if different < 0 else 12), "of 24"


def test_random_streams_stay_those_of_each(planned: list[Any]) -> None:
    tf.random.set_seed(1)
    plain = Net(noise=0.1)
    expected = [plain.step(X, length) for length in (*LENGTHS, *LENGTHS)]
    tf.random.set_seed(1)
    net = Net(noise=0.1)
    step = optimized(net.step)
    close([step(X, length) for length in (*LENGTHS, *LENGTHS)], expected)
    close(values(net.variables), values(plain.variables))
    assert planned


@pytest.mark.long
def test_what_cannot_follow_is_planned(planned: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    step = optimized(Net().step)
    step(X, LENGTHS[0])
    fewer = len(planned)

    def refused(*_: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("tfmem.capture.captured_source.followed", refused)
    plain, net = Net(), Net()
    again = optimized(net.step)
    close(again(X, LENGTHS[1]), plain.step(X, LENGTHS[1]))
    assert len(planned) - fewer > fewer + 5
    assert regions_of(tfmem.report(again)) == regions_of(tfmem.report(step))
