"""Plans get a dry run where memory may run out: on a GPU, played here by the CPU with the GPU's kind of allocator."""

from __future__ import annotations

import functools
import json
import os
from typing import Any

import pytest
import tensorflow as tf

from graph_passes.graph import serde
from tests.tf.python_server import run_python
from tfmem.steps.dry_run import can_dry_run, without_updates

PROGRAM = r"""
import dataclasses, json, sys
import numpy as np, tensorflow as tf
import tfmem
from custom_ops.load import load
from graph_passes import pipeline
from graph_passes.analysis.memory.fragmentation import Room
from graph_passes.analysis.memory.simulate import Link
from tests.tf.conftest import IMAGES, LABELS, make_net
from tfmem.api import make_engine, optimize_with
from tfmem.devices import Target
from tfmem.runtime.device_memory import DeviceMemory
from tfmem.runtime.measured_call import Meter

task, calls = json.loads(sys.argv[1]), []

def broken(*given, **how):
    raise KeyError(168)

class Played(Target):
    is_gpu = True

class InOnePiece(DeviceMemory):
    def room(self, timeline, budget):  # a CPU's is not in one piece
        return Room.guess(1 << 30, timeline.base)

class Failing(Meter):
    def sampled(self, *given):
        calls.append(given)
        for name in task["broken"] if len(calls) == 2 else ():
            setattr(pipeline, name, broken)
        if len(calls) in task["fail_calls"]:
            raise tf.errors.ResourceExhaustedError(None, None, "Detected at node 'Conv2D' at: OOM when allocating")
        return super().sampled(*given)

    def clock(self, row):
        return row.host_ns

def optimized(function, budget):  # the CPU is played as a GPU, by values that are handed in
    options = tfmem.OffloadOptions(policy="autovm")
    engine = make_engine(tfmem.Options(memory_budget=budget, offload=options, cache_directory=""), called=True)
    target = Played(**vars(engine.settings.target))
    # surely_fits: the CPU's kernels take far more than is estimated
    settings = dataclasses.replace(engine.settings, target=target, surely_fits=0)
    engine = dataclasses.replace(
        engine,
        settings=settings,
        memory=InOnePiece(library, target, options),
        meter=Failing(library, target),
        link=Link(1e9, 1e9),
    )
    return optimize_with(engine, function)

library, net = load(), make_net()
batch = tf.constant(IMAGES), tf.constant(LABELS)
slots = [tf.Variable(tf.zeros_like(variable)) for variable in net.variables]

def train(x, y):
    with tf.GradientTape() as tape:
        loss = net.loss(x, y)
    for variable, slot, gradient in zip(net.variables, slots, tape.gradient(loss, net.variables)):
        slot.assign_add(0.1 * gradient)
        variable.assign_sub(slot)
    return loss, tf.random.normal([], seed=1), tf.random.shuffle(tf.range(9), seed=2)

def addresses():
    return [np.asarray(variable.read_value()).__array_interface__["data"][0] for variable in net.variables]

function = tf.function(train)
if task["budget"]:
    function = optimized(function, task["budget"])
losses, draws, places = [], [], []
start, error = [variable.numpy() for variable in net.variables], None
for _ in range(6):
    try:
        loss, *drawn = function(*batch)
    except tfmem.InfeasibleBudgetError as raised:
        unchanged = all(np.array_equal(old, new) for old, new in zip(start, net.variables))
        error = repr(raised.__cause__), raised.smallest_budget, unchanged
        break
    losses.append(loss.numpy().tobytes().hex())
    draws.append([value.numpy().tolist() for value in drawn])
    places.append(addresses())
with tf.device("CPU:0"):
    chunks, growth = (value.numpy().tolist() for value in library.chunks())
    limit = int(library.stats()[2])
result = {"losses": losses, "draws": draws, "places": places, "calls": len(calls)}
result |= {"chunks": chunks, "growth": growth, "limit": limit}
result["moved"] = library.counters().bytes_in
result["error"] = error
result["report"] = json.loads(tfmem.report(function).to_json()) if task["budget"] and not error else None
print("RESULT " + json.dumps(result))
"""


def run(budget: int = 0, fail_calls: tuple[int, ...] = (), broken: tuple[str, ...] = ()) -> dict[str, Any]:
    environment = {
        **os.environ,
        "TFMEM_CACHE_DIR": "",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
    }
    task = json.dumps({"budget": budget, "fail_calls": fail_calls, "broken": broken})
    done = run_python(["-c", PROGRAM, task], environment)
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


@functools.cache
def plain() -> dict[str, Any]:
    return run()


@functools.cache
def budget() -> int:
    """Trained a tensor less than the step was seen to need."""
    return int(run(1 << 26)["report"]["peak_measured"]) - (1 << 18)


@functools.cache
def dry_run() -> dict[str, Any]:
    return run(budget())


def test_dry_runs_leave_every_variable_as_it_was() -> None:
    assert dry_run()["losses"] == plain()["losses"]
    assert dry_run()["calls"] >= 3  # all in the first call, which trained once
    assert dry_run()["moved"] > 0


def test_dry_runs_leave_random_ops_at_their_start() -> None:
    assert len({str(drawn) for drawn in plain()["draws"]}) == 6
    assert dry_run()["draws"] == plain()["draws"]


def test_variables_stay_where_they_are() -> None:
    """One that moves would split the room that a later step needs."""
    assert len({tuple(places) for places in dry_run()["places"]}) == 1


def test_small_tensors_have_chunks_of_their_own() -> None:
    small = [size for _, size, in_use in dry_run()["chunks"] if not in_use and size <= 1 << 16]
    assert len(small) > 20
    assert sum(size for _, size, in_use in plain()["chunks"] if not in_use and size <= 1 << 16) < sum(small)


def test_an_allocator_that_grows_says_how_far() -> None:
    result = plain()
    assert result["growth"] == result["limit"] - sum(size for _, size, _ in result["chunks"])
    assert result["growth"] > 0


@pytest.mark.parametrize("fail_calls", [(1,), (2,), (3,)])
def test_any_dry_run_may_run_out_of_memory(fail_calls: tuple[int, ...]) -> None:
    result = run(budget(), fail_calls)
    assert result["losses"] == plain()["losses"]
    assert result["draws"] == plain()["draws"]
    assert any("ran out of memory at 'Conv2D'" in note for note in result["report"]["notes"])


def test_a_fault_after_a_dry_run_leaves_the_plan_that_was_tried() -> None:
    result = run(budget(), broken=("plan_step",))
    assert result["losses"] == plain()["losses"]
    assert result["report"]["decision"] == "moved"
    assert any("Traceback" in note and "KeyError: 168" in note for note in result["report"]["notes"])


def test_a_plan_of_a_dry_run_that_cannot_be_made_is_refused_before_anything_is_written() -> None:
    result = run(budget(), broken=("apply_rewrites",))
    cause, enough, unchanged = result["error"]
    assert cause == "KeyError(168)"
    assert enough > budget()
    assert unchanged


def graph_of(function: Any) -> Any:
    concrete = tf.function(function).get_concrete_function(tf.TensorSpec((4,)))
    return serde.from_graph_def(concrete.graph.as_graph_def(), inferred=concrete.graph)


def test_what_others_would_notice_gets_no_dry_run() -> None:
    variable = tf.Variable(tf.zeros(4))

    def quiet(x: tf.Tensor) -> tf.Tensor:
        variable.assign_add(x)
        return variable * tf.random.uniform((4,))

    def printing(x: tf.Tensor) -> tf.Tensor:
        tf.print(x)
        return x

    assert can_dry_run(graph_of(quiet))
    assert not can_dry_run(graph_of(printing))
    assert not can_dry_run(graph_of(lambda x: tf.numpy_function(lambda value: value, [x], tf.float32)))


def test_updates_are_left_out_and_waited_for_all_the_same() -> None:
    variable = tf.Variable(tf.zeros(4))
    concrete = tf.function(variable.assign_add).get_concrete_function(tf.TensorSpec((4,)))
    before = concrete.graph.as_graph_def()
    update = next(node for node in before.node if node.op == "AssignAddVariableOp")
    after = next(node for node in without_updates(before).node if node.name == update.name)
    assert after.op == "NoOp"
    assert {name.removeprefix("^") for name in after.input} == {name.removeprefix("^") for name in update.input}
    assert [node.name for node in without_updates(before).node] == [node.name for node in before.node]
