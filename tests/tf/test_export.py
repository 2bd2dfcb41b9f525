"""What tfmem exports: SavedModels with kernels for several GPUs, which Python, Keras and a C++ program load."""

from __future__ import annotations

import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework.node_def_pb2 import NodeDef

import tfmem
from custom_ops.errors import KernelError
from custom_ops.jit import nvrtc
from tests.tf.served import numbers, served

UNITS, BATCH, TIME, FEATURES = 8, 3, 5, 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keras.utils.set_random_seed(0)
    module = tf.Module()
    module.layer = keras.layers.LSTM(UNITS, return_sequences=True)
    module.run = tf.function(module.layer, input_signature=[tf.TensorSpec((None, TIME, FEATURES))])
    path = tmp_path_factory.mktemp("saved") / "lstm"
    tf.saved_model.save(module, str(path), signatures=module.run)
    return path


@pytest.fixture(scope="module")
def exported(saved: Path) -> Path:
    """With kernels for two GPUs where NVRTC is installed."""
    try:
        nvrtc.compiler_version()
    except KernelError:
        architectures: tuple[str, ...] = ()
    else:
        architectures = ("sm_90", "sm_80")
    options = tfmem.Options(recurrent=tfmem.RecurrentOptions(batches=(1, 64)))
    output = saved.parent / "exported"
    return Path(tfmem.optimize(saved, output=output, options=options, architectures=architectures))


def expected(saved: Path) -> np.ndarray:
    ones = tf.ones([BATCH, TIME, FEATURES])
    return tf.saved_model.load(str(saved)).signatures["serving_default"](ones)["output_0"].numpy()


def test_kernels_for_each_gpu_and_ptx_for_later_ones_are_inside(exported: Path) -> None:
    pytest.importorskip("cuda.bindings")
    headers = re.findall(rb"kernel 1\nkind (\w+)\narch (\d+)\n(?:\w+ \S*\n)*?max_batch (\d+)", pb(exported))
    found = {(kind.decode(), int(arch), int(batch)) for kind, arch, batch in headers}
    largest = (1 << 31) - 1
    assert found == {(kind, arch, batch) for kind, arch, batch in [
        ("cubin", 80, 1), ("cubin", 80, largest), ("cubin", 90, 1), ("cubin", 90, largest), ("ptx", 80, largest)
    ]}  # fmt: skip
    assert b".target sm_80" in pb(exported)  # the text of PTX
    (line,) = tfmem.report(exported).replaced
    assert "untimed kernels: cubin 8.0, cubin 9.0, ptx 8.0" in line


def pb(path: Path) -> bytes:
    return (path / "saved_model.pb").read_bytes()


def test_the_report_names_the_model_and_its_signature(exported: Path) -> None:
    assert tfmem.report(exported).headline == "`lstm.serving_default`: no memory budget; 1 recurrent layer replaced"


def test_python_and_keras_load_it(saved: Path, exported: Path) -> None:
    tfmem.load_ops()
    ones = tf.ones([BATCH, TIME, FEATURES])
    served = tf.saved_model.load(str(exported)).signatures["serving_default"](ones)["output_0"]
    layer = keras.layers.TFSMLayer(str(exported), call_endpoint="serving_default")
    for found in (served, layer(ones)["output_0"]):
        np.testing.assert_allclose(found, expected(saved), rtol=1e-5, atol=1e-6)


@pytest.mark.long  # the C API starts for seconds
def test_a_program_without_python_loads_it(saved: Path, exported: Path) -> None:
    signature = tf.saved_model.load(str(exported)).signatures["serving_default"]
    name = next(iter(signature.structured_input_signature[1]))
    ones = f"{name}=float:{BATCH},{TIME},{FEATURES}"
    ways: list[dict[str, bool]] = [{}, {"preloaded": True}, {"linked": True}]
    for way in ways:
        found = numbers(served(exported, ones, **way)).reshape(BATCH, TIME, UNITS)
        np.testing.assert_allclose(found, expected(saved), rtol=1e-5, atol=1e-6)
    missing = served(exported, ones, library=exported / "nothing.so")
    assert missing.returncode == 1
    assert "cannot load the op library" in missing.stderr
    without = served(exported, ones, library="")
    assert without.returncode == 1
    assert "Op type not registered 'TfmemRecurrent'" in without.stderr


def test_what_was_optimised_is_not_optimised_again(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(tfmem.AlreadyOptimizedError, match="pass the path of the original"):
        tfmem.optimize(exported, memory_budget="1GiB", output=tmp_path / "twice")
    assert not (tmp_path / "twice").exists()


@pytest.mark.parametrize("name", ["sm_60", "90", "hopper"])
def test_unknown_architectures_are_refused(saved: Path, name: str, tmp_path: Path) -> None:
    with pytest.raises(tfmem.OptionsError, match=r"architectures.*sm_80"):
        tfmem.optimize(saved, output=tmp_path / "none", architectures=(name,))


def test_fused_regions_have_kernels_for_each_gpu_and_run_on_a_cpu_without(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings")
    keras.utils.set_random_seed(0)
    module = tf.Module()
    layers = [keras.layers.Dense(32, "gelu"), keras.layers.LayerNormalization(), keras.layers.Softmax()]
    module.layers = keras.Sequential([keras.Input((16,)), *layers])
    module.run = tf.function(module.layers, input_signature=[tf.TensorSpec((None, 16))])
    tf.saved_model.save(module, str(tmp_path / "mlp"), signatures={"run": module.run})
    given = {"passes": ("fusion",), "architectures": ("sm_80", "sm_90")}
    fused = Path(tfmem.optimize(tmp_path / "mlp", output=tmp_path / "fused", **given))
    kinds = [(kind.decode(), int(arch)) for kind, arch in re.findall(rb"kernel 1\nkind (\w+)\narch (\d+)", pb(fused))]
    assert set(kinds) == {("cubin", 80), ("cubin", 90), ("ptx", 80)}
    assert len({kinds.count(each) for each in kinds}) == 1, "a whole set of kernels for each"
    assert "kernels of fused regions for GPUs: cubin 8.0, cubin 9.0, ptx 8.0" in tfmem.report(fused).notes
    x = tf.random.stateless_normal([3, 16], [1, 2])
    before, after = (tf.saved_model.load(str(each)) for each in (tmp_path / "mlp", fused))
    assert any(node.op == "TfmemFusion" for node in functions_of(after))
    np.testing.assert_allclose(after.run(x), before.run(x), rtol=1e-5, atol=1e-6)
    layer = keras.layers.TFSMLayer(str(fused), call_endpoint="run")
    np.testing.assert_allclose(layer(x), before.run(x), rtol=1e-5, atol=1e-6)


@pytest.mark.long  # the C API starts for seconds
def test_a_program_without_python_loads_fused_regions(tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    module = tf.Module()
    layers = [keras.layers.Dense(32, "gelu"), keras.layers.LayerNormalization(), keras.layers.Softmax()]
    module.layers = keras.Sequential([keras.Input((16,)), *layers])
    module.run = tf.function(module.layers, input_signature=[tf.TensorSpec((None, 16), name="x")])
    tf.saved_model.save(module, str(tmp_path / "mlp"), signatures=module.run)
    fused = Path(tfmem.optimize(tmp_path / "mlp", output=tmp_path / "fused", passes=("fusion",)))
    assert b"TfmemFusion" in pb(fused)
    expected = module.run(tf.ones([3, 16]))
    np.testing.assert_allclose(numbers(served(fused, "x=float:3,16")).reshape(3, 32), expected, rtol=1e-5, atol=1e-6)


def functions_of(loaded: tf.Module) -> list[NodeDef]:
    library = loaded.signatures["run"].graph.as_graph_def().library
    return [node for function in library.function for node in function.node_def]


def test_fused_loops_within_loops_are_exported(tmp_path: Path) -> None:
    """TensorFlow makes a graph of a body to save it, and finds what the body calls by the body alone."""
    module = tf.Module()

    def inner(y: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda i, _: i < 2, lambda i, z: (i + 1, tf.tanh(z * 2 + 1) * tf.sigmoid(z)), (0, y))[1]

    @tf.function(input_signature=[tf.TensorSpec([None, 8])])
    def run(x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, inner(y)), (0, x))[1]

    module.run = run
    tf.saved_model.save(module, str(tmp_path / "loops"), signatures={"run": run})
    fused = tfmem.optimize(tmp_path / "loops", output=tmp_path / "fused", passes=("fusion",))
    x = tf.random.stateless_normal([3, 8], [1, 2])
    before, after = (tf.saved_model.load(str(each)) for each in (tmp_path / "loops", fused))
    assert any(node.op == "TfmemFusion" for node in functions_of(after))
    np.testing.assert_allclose(after.run(x), before.run(x), rtol=1e-5, atol=1e-6)
