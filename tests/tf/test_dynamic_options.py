"""Options of `tfmem.dynamic`: the device of a net, and where its kernels are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

import tfmem
from custom_ops.dynamic.codegen.gpu_program import DynamicProgram
from graph_passes.analysis.cost import device_costs as profiles
from tests.tf.python_server import run_python
from tfmem import dynamic
from tfmem.devices import Target
from tfmem.dynamic import gpu
from tfmem.options import Options


class FakeDevice:
    """A GPU that is never asked to run anything."""

    arch, name, processors = 90, "a GPU", 4

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal

    def __enter__(self) -> FakeDevice:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture(name="folders")
def fixture_folders(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where kernels are kept, as a process with one GPU says when it makes one."""
    found: list[Path] = []

    def build(spec, arch, chip, rows, cache) -> DynamicProgram:
        found.append(cache.folder)
        raise gpu.KernelError("none is made here")

    def find_target(wanted: str, library: object) -> Target:
        return Target(wanted or "/device:GPU:0", "a GPU", 1 << 30, profiles.load("cpu"))

    monkeypatch.setattr(gpu, "find_target", find_target)
    monkeypatch.setattr(gpu, "DeviceContext", FakeDevice)
    monkeypatch.setattr(gpu.nvrtc, "compiler_version", lambda: "1")
    monkeypatch.setattr(gpu, "build", build)
    return found


def net(**given: object) -> dynamic.Handle:
    table = tf.Variable(tf.ones([3, 4]))
    kind = dynamic.node(lambda children, row: dynamic.embedding_lookup(table, row))
    return dynamic.specialize([table], {"row": kind}, state=4, **given)


@pytest.mark.filterwarnings("ignore:the net runs on the CPU")
def test_kernels_are_kept_where_options_say(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFMEM_CACHE_DIR", str(tmp_path / "by the environment"))
    net()
    net(options=Options(cache_directory=str(tmp_path / "by options")))
    assert folders == [tmp_path / "by the environment" / "kernels", tmp_path / "by options" / "kernels"]


def test_a_device_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(tfmem.OptionsError, match="device='GPU:7': there is no such device; there are: /device:CPU:0"):
        net(options=Options(device="GPU:7"))
    monkeypatch.setenv("TFMEM_DEVICE", "GPU:7")
    with pytest.raises(tfmem.OptionsError, match="device='GPU:7'"):
        net()
    net(options=Options())
    with pytest.raises(tfmem.OptionsError, match="options"):
        net(options="GPU:7")


def test_an_op_is_placed_on_the_device_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = net(options=Options(device="CPU:0"))

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)] * 3)
    def run(*batch: tf.Tensor) -> tf.Tensor:
        return handle.forward(batch).losses

    (op,) = [op for op in run.get_concrete_function().graph.get_operations() if op.type == "TfmemDynamic"]
    assert op.device.endswith("CPU:0")
    program = object()
    monkeypatch.setattr(
        gpu, "find_target", lambda wanted, library: Target("/device:GPU:1", "", 1, profiles.load("cpu"))
    )
    with tf.Graph().as_default(), gpu.Programs(Options(device="GPU:1")).place(program):
        assert tf.constant(1).device.endswith("GPU:1")


def test_what_an_optimizer_keeps_lies_beside_its_parameter() -> None:
    """In a separate process, which has two devices."""
    program = """
import tensorflow as tf
from tfmem import dynamic
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
with tf.device("/CPU:1"):
    table = tf.Variable(tf.ones([3, 4]))
kind = dynamic.node(lambda children, row: dynamic.embedding_lookup(table, row))
net = dynamic.specialize([table], {"row": kind}, state=4, optimizer=dynamic.Adam())
kept = [variable.device for variable in net.slots.in_order]
assert len(kept) == 2 and set(kept) == {table.device}, (kept, table.device)
"""
    done = run_python(["-c", program])
    assert done.returncode == 0, done.stderr
