"""Graphs that Grappler left, kept on disk: found by the same input alone, and equal to what it makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tfmem
from tfmem.capture import grappler, kept_graphs
from tfmem.capture.captured import Captured
from tfmem.capture.concrete_function import capture_concrete
from tfmem.capture.grappler import run_grappler
from tfmem.capture.kept_graphs import KeptGraphs


@pytest.fixture(name="runs")
def fixture_runs(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An entry for each run of Grappler; graphs of any size are kept."""
    runs: list[None] = []
    run = grappler._run
    monkeypatch.setattr(grappler, "_run", lambda *inputs: (runs.append(None), run(*inputs))[1])
    monkeypatch.setattr(kept_graphs, "FEWEST", 0)
    return runs


@pytest.fixture(name="optimized")
def fixture_optimized(tmp_path: Path) -> Callable[..., Captured]:
    """Grappler's graph of a captured one, with what is kept in a new folder."""
    kept = KeptGraphs(str(tmp_path), {"device": "of this test"})
    return lambda captured, **how: run_grappler(captured, **{"device": "CPU", "kept": kept, **how})


def captured(factor: float = 2.0) -> Captured:
    """A step with a constant to fold, and writes that have to survive."""
    variables = [tf.Variable(tf.ones([8, 8])) for _ in range(3)]

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        for variable in variables:
            variable.assign_add(tf.matmul(x, tf.constant(factor) * tf.ones([8, 8])))
        return tf.reduce_sum(x) * tf.exp(tf.constant(1.0))

    concrete = step.get_concrete_function(tf.TensorSpec([8, 8]))
    return capture_concrete(concrete)


def test_the_same_graph_is_optimised_once(runs: list[None], optimized: Any) -> None:
    given = captured()
    first, second = optimized(given), optimized(given)
    assert len(runs) == 1
    assert second.graph_def == first.graph_def
    assert second.graph_def == run_grappler(given, device="CPU").graph_def
    other_order = replace(given, control_fetches=tuple(reversed(given.control_fetches)))
    assert len(given.control_fetches) > 1
    assert optimized(other_order).graph_def == first.graph_def
    assert len(runs) == 2


def test_what_a_graph_depends_on(runs: list[None], optimized: Any, tmp_path: Path) -> None:
    given = captured()
    optimized(given)
    optimized(captured(3.0))
    assert len(runs) == 2
    optimized(given, kept=KeptGraphs(str(tmp_path), {"device": "another"}))
    assert len(runs) == 3
    optimized(given, portable=True)
    assert len(runs) == 4
    tf.config.optimizer.set_experimental_options({"constant_folding": False})
    try:
        optimized(given)
    finally:
        tf.config.optimizer.set_experimental_options({"constant_folding": True})
    assert len(runs) == 5


@pytest.mark.parametrize("content", [b"", b"no graph"])
def test_what_is_no_graph_is_made_again(runs: list[None], optimized: Any, tmp_path: Path, content: bytes) -> None:
    given = captured()
    first = optimized(given)
    (file,) = (each for each in tmp_path.rglob("*") if each.is_file())
    file.write_bytes(content)
    assert optimized(given).graph_def == first.graph_def
    assert len(runs) == 2
    optimized(given)
    assert len(runs) == 2


def test_what_fails_and_what_is_small_or_not_to_be_kept_leaves_no_file(
    runs: list[None], optimized: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = captured()
    optimized(given, kept=KeptGraphs("", {}))
    monkeypatch.setattr(kept_graphs, "FEWEST", 1000)
    optimized(given)
    monkeypatch.setattr(kept_graphs, "FEWEST", 0)

    def fails(*_: Any) -> Any:
        raise ValueError("as Grappler fails")

    monkeypatch.setattr(grappler, "_run", fails)
    assert optimized(given).graph_def.node
    assert not list(tmp_path.rglob("*"))


def test_a_step_under_a_budget_is_optimised_once_in_an_environment(
    runs: list[None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = tf.Variable(tf.ones([8, 8]))

    def train() -> None:
        step = tfmem.optimize(tf.function(variable.assign_add), memory_budget="200MiB", cache_directory=str(tmp_path))
        step(tf.ones([8, 8]))

    train()
    train()
    assert len(runs) == 1
    monkeypatch.setenv("TF_OF_A_TEST", "1")
    train()
    assert len(runs) == 2
