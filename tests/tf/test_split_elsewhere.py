"""Objects other than functions below the smallest budget without a split: what is refused says so in a sentence."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.refusals import Reason
from tests.tf.memory_in_use import in_use
from tests.tf.split_steps import close

MIB = 1 << 20


def why(kind: str) -> str:
    """The end of the error."""
    return f"it was not split along the batch: {Reason.SPLIT_IN_PLACE(kind=kind)}"


def graph_of(budget: int) -> tf.Graph:
    """A step of two wide layers of which `avm_gradients` makes the gradients; built within `budget`."""
    v1 = tf.compat.v1
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [256, 64], name="x")
        variables = [
            v1.get_variable(f"w{n}", shape, use_resource=True) for n, shape in enumerate([(64, 4096), (4096, 8)])
        ]
        loss = tf.reduce_mean(tf.square(tf.nn.relu(x @ variables[0]) @ variables[1]))
        if budget:
            gradients = tfmem.avm_gradients(loss, variables, memory_budget=budget)
        else:
            gradients = tf.gradients(loss, variables)
        [v1.assign_sub(each, 0.1 * gradient) for each, gradient in zip(variables, gradients, strict=True)]
    return graph


def test_a_graph_whose_largest_op_exceeds_the_budget_is_refused_in_a_sentence() -> None:
    with pytest.raises(tfmem.InfeasibleBudgetError) as caught:
        graph_of(in_use() + 6 * MIB)
    assert why("Graph") in str(caught.value)
    given = graph_of(0).as_graph_def()
    with pytest.raises(tfmem.InfeasibleBudgetError) as caught:
        tfmem.optimize(given, memory_budget=in_use() + 6 * MIB)
    assert why("GraphDef") in str(caught.value)


def test_a_function_in_a_saved_model_is_split(new_net: Any, tmp_path: Path) -> None:
    """The function that was saved runs by the pieces that it was planned with."""
    images = np.random.default_rng(1).normal(size=(64, 32, 32, 2)).astype("float32")
    labels = np.arange(64) % 5
    net = new_net()
    module = tf.Module()
    module.kept = net.variables
    specs = [tf.TensorSpec(images.shape), tf.TensorSpec(labels.shape, tf.int64)]
    module.train = tf.function(net.step, input_signature=specs)
    tf.saved_model.save(module, str(tmp_path / "given"))
    del module, net
    gc.collect()
    loaded = tf.saved_model.load(str(tmp_path / "given"))
    expected = [float(loaded.train(images, labels)) for _ in range(3)]
    del loaded
    budget = in_use() + 4 * MIB
    tfmem.optimize(str(tmp_path / "given"), output=str(tmp_path / "split"), memory_budget=budget)
    report = tfmem.report(str(tmp_path / "split"))
    assert report.splits
    loaded = tf.saved_model.load(str(tmp_path / "split"))
    close([float(loaded.train(images, labels)) for _ in range(3)], expected, 1e-4)
