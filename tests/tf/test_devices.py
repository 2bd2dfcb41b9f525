"""What a measurement depends on besides the graph."""

import json
from dataclasses import replace

import pytest
import tensorflow as tf

import tfmem
from tfmem.devices import conditions, find_target, products_of_float32


@pytest.fixture
def target():
    return find_target("CPU:0", tfmem.load_ops())


def test_conditions_can_be_written_and_stay_the_same(target):
    found = conditions(target)
    assert json.loads(json.dumps(found)) == found == conditions(target)
    assert found["tensorflow"] == tf.__version__


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
