"""What a measurement depends on besides the graph."""

import json
from dataclasses import replace

import pytest
import tensorflow as tf

import tfmem
from graph_passes.analysis.memory.simulate import Link
from tfmem.devices import conditions, find_target, products_of_float32


@pytest.fixture
def target():
    return find_target("CPU:0", tfmem.load_ops())


def test_conditions_can_be_written_and_stay_the_same(target):
    found = conditions(target)
    assert json.loads(json.dumps(found)) == found == conditions(target)
    assert found["tensorflow"] == tf.__version__


def test_a_link_is_measured_when_a_step_needs_it(monkeypatch):
    """Measuring takes its time, so a step that fits does without."""
    measured = []
    monkeypatch.setattr(tfmem.api, "links_together", tfmem.devices.links_together)
    monkeypatch.setattr(tfmem.devices, "measured_link", lambda *given: measured.append(given) or Link(1e9, 2e9))
    variable = tf.Variable(tf.ones([1 << 20]))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            for _ in range(8):
                x = tf.tanh(x * variable)
            loss = tf.reduce_mean(x)
        variable.assign_sub(tape.gradient(loss, variable))
        return loss

    options = {"passes": ("offload",), "cache_directory": "", "observe": False}
    x = tf.ones([1 << 20])
    fits = tfmem.optimize(step, memory_budget="1GiB", **options)
    fits(x)
    assert "fits" in tfmem.report(fits).decision
    assert not measured
    with pytest.raises(tfmem.InfeasibleBudgetError) as caught:
        tfmem.optimize(step, memory_budget="1MiB", **options)(x)
    moves = tfmem.optimize(step, memory_budget=caught.value.least, **options)
    moves(x)
    assert tfmem.report(moves).transfers
    assert len(measured) == 2  # once for each of the two that do not fit, though plans read it thousands of times


def test_a_link_that_cannot_be_measured_is_told(target, tmp_path):
    library, nowhere = tfmem.load_ops(), str(tmp_path / "missing")
    with pytest.warns(tfmem.TfmemWarning, match="could not be measured, so plans assume .* GB/s in: .*missing"):
        link = tfmem.devices.measured_link(target, library, nowhere)
    assert (link.offload, link.prefetch) == (target.profile.offload, target.profile.prefetch)


def test_conditions_follow_flags_that_choose_kernels(target, monkeypatch):
    before = conditions(target)
    monkeypatch.setenv("TF_CUDNN_WORKSPACE_LIMIT_IN_MB", "32")
    assert conditions(target) != before
    monkeypatch.delenv("TF_CUDNN_WORKSPACE_LIMIT_IN_MB")
    precision = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(not precision)
    try:
        assert conditions(target) != before
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(precision)
    assert conditions(target) == before


@pytest.mark.parametrize("allowed", [False, True])
def test_precision_is_what_tensorflow_allows_and_the_gpu_has(allowed):
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(allowed)
    try:
        assert products_of_float32({"compute_capability": (9, 0)}) == ("tf32" if allowed else "highest")
        assert products_of_float32({"compute_capability": (7, 5)}) == "highest"
        assert products_of_float32({}) == "highest"
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


def test_a_cpu_has_one_precision(target):
    assert target.precision == "highest"


def test_a_gpus_driver_and_cudnn_count(target):
    gpu = replace(target, name="/device:GPU:0")
    assert {"driver", "cudnn"} <= set(conditions(gpu))  # empty and 0 where there is none
