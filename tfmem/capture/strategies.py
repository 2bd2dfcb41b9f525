"""What tfmem says of distribution strategies under which a step, or a part of it, cannot be optimised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from graph_passes.errors import ReplicasError
from tfmem.capture.concrete_function import ConcreteFunction, strategies_of

_SERVERS = (tf.distribute.ParameterServerStrategy, tf.compat.v1.distribute.experimental.ParameterServerStrategy)
_TPUS = (tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy)
_COORDINATED = (
    "under ParameterServerStrategy other processes run the steps, and tfmem neither measures nor edits what runs "
    "there; give ClusterCoordinator.schedule the tf.function itself, or fit the model itself, without tfmem.optimize; "
    "to train within a budget use MirroredStrategy or MultiWorkerMirroredStrategy"
)
_OF_TPUS = (
    "under TPUStrategy XLA compiles steps for a TPU, which has no kernels for tfmem's ops; train without "
    "tfmem.optimize, or on GPUs under MirroredStrategy"
)
_ON_MESH = (
    "DTensor splits the ops of a step that it knows over the devices of a mesh, and it knows none of tfmem's; train "
    "without tfmem.optimize, or under MirroredStrategy"
)


def runs_elsewhere(cf: ConcreteFunction) -> str:
    """Why tfmem leaves a function alone: it runs in other processes, on a TPU or on a mesh; "" if it does not."""
    return elsewhere_under(strategies_of(cf)) or on_mesh(cf._captured_inputs)


def elsewhere_under(strategies: Iterable[Any]) -> str:
    """Why tfmem leaves all steps under one of these strategies alone; "" if it does not."""
    given = tuple(strategies)
    if any(isinstance(each, _SERVERS) for each in given):
        return _COORDINATED
    return _OF_TPUS if any(isinstance(each, _TPUS) for each in given) else ""


def on_mesh(tensors: Iterable[Any]) -> str:
    """Why tfmem leaves a call with these tensors alone: they are of DTensor; "" if they are not."""
    places = {tensor.device for tensor in tensors if isinstance(tensor, tf.Tensor) and hasattr(tensor, "numpy")}
    return _ON_MESH if any("/device:CUSTOM:" in place for place in places) else ""


def require_no_coordinator() -> None:
    """
    Raises:
        ReplicasError: this process is the coordinator of parameter servers, which schedules only functions of
            TensorFlow's.
    """
    if any(device.name.startswith("/job:ps/") for device in tf.config.list_logical_devices()):
        raise ReplicasError(_COORDINATED)


def other_replicas() -> str:
    """What is said of a step that one of several replicas is building; "" if there is but one."""
    if tf.distribute.in_cross_replica_context():
        return ""
    count = int(tf.distribute.get_strategy().num_replicas_in_sync)
    return f"it is built under {_strategy()} with {count} replicas" if count > 1 else ""


@contextmanager
def merges_told() -> Iterator[None]:
    """Around what traces: says what to do where a replica cannot meet others while a function of it is traced.

    Raises:
        ReplicasError: so it is. TensorFlow calls this a `merge_call`; an optimizer makes one in a single replica, too.
    """
    try:
        yield
    except RuntimeError as error:
        if "merge_call" in str(error) and tf.distribute.has_strategy():
            raise ReplicasError(_INNER.format(_strategy())) from error
        raise


def _strategy() -> str:
    return type(tf.distribute.get_strategy()).__name__


_INNER = (
    "under {} replicas meet within what `strategy.run` calls, so that cannot be an optimised function; optimise the "
    "function around it: tfmem.optimize(tf.function(lambda batch: strategy.run(step, args=(batch,)))), where `step` is "
    "the function itself"
)
