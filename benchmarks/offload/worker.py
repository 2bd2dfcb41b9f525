"""Runs one case of the offload benchmark in this process:
`python -m benchmarks.offload.worker TASK_JSON RESULT_FILE`.

A step's time ends when its loss is on the host. Peaks are TensorFlow's allocator's, over the timed
steps. Stalls are timed in separate steps, because timing them costs events."""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from custom_ops.load import Library, load
from examples import models

PARITY_STEPS = 20
STALL_STEPS = 5
LINK_BYTES = 1 << 30
NO_WORKSPACE = "CUDNN failed to allocate the scratch space"  # what a convolution without room ends in

Step = Callable[[], float]


def main() -> None:
    """Read the task, run it, write the result."""
    task, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    try:
        result = link() if task["system"] == "link" else measure(task)
    except (tf.errors.ResourceExhaustedError, tf.errors.UnknownError) as error:
        full = isinstance(error, tf.errors.ResourceExhaustedError) or NO_WORKSPACE in str(error)
        result = {"status": "oom", "message": _head(error)} if full else _failure(error)
    except Exception as error:
        traceback.print_exc()
        result = _failure(error)
    path.write_text(json.dumps(result))


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Train the task's network and time its steps."""
    device = prepare(task["cap"], task["deterministic"])
    library = load() if task["system"] == "tfmem" else None
    began = time.perf_counter()
    step, reported = {"function": function, "graph": graph, "keras": keras_model}[task["form"]](task)
    build_seconds = time.perf_counter() - began

    losses, seconds = [], []
    for index in range(task["warm_up"] + task["steps"]):
        if index == task["warm_up"]:
            tf.config.experimental.reset_memory_stats(device)
            before = library.counters() if library else None
        began = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - began)
    after = library.counters() if library else None
    memory = tf.config.experimental.get_memory_info(device)
    timed = seconds[task["warm_up"] :]
    result = {
        "status": "ok",
        "device": device,
        "device_name": device_name(),
        "versions": versions(),
        "tensor_float_32": tf.config.experimental.tensor_float_32_execution_enabled(),
        "jit_compile": False,
        "build_seconds": build_seconds,
        "warm_up_seconds": seconds[: task["warm_up"]],
        "seconds": timed,
        "median_seconds": statistics.median(timed),
        "peak": memory["peak"],
        "losses": losses[:PARITY_STEPS],
        "process_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }
    if library:
        import tfmem

        result |= {
            "bytes_out": (after.bytes_out - before.bytes_out) // task["steps"],
            "bytes_in": (after.bytes_in - before.bytes_in) // task["steps"],
            "pinned_bytes": after.pinned_bytes_allocated,
            "spill_bytes": after.spill_bytes_allocated,
            "stall_ns": stall(library, step),
            "report": without_curves(json.loads(tfmem.report(reported).to_json())),
        }
    return result


def without_curves(report: dict[str, Any]) -> dict[str, Any]:
    """No table shows them, and of a deep net they are thousands of numbers."""
    return {key: value for key, value in report.items() if not key.startswith("curve_")}


def prepare(cap: int | None, deterministic: bool) -> str:
    """Set up TensorFlow; returns the device that trains."""
    keras.utils.set_random_seed(0)
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return "CPU:0"  # TensorFlow has no cap for a CPU
    if cap:
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=cap >> 20)
        tf.config.set_logical_device_configuration(gpus[0], [limit])
    tf.config.list_logical_devices()  # a session that comes first would start the device without its cap
    return "GPU:0"


def optimised(made: Any, task: dict[str, Any]) -> Any:
    """A function or a model as the task's system has it."""
    if task["system"] != "tfmem":
        return made
    import tfmem

    passes = ("recurrent", "offload")  # these cases are about memory alone
    return tfmem.optimize(made, memory_budget=budget(task), policy=task["policy"], passes=passes)


def function(task: dict[str, Any]) -> tuple[Step, Any]:
    """The step as a tf.function with a GradientTape; and what tfmem reports on."""
    step = optimised(models.make_step(network(task)), task)
    images, labels = batch(task)
    return lambda: float(step(images, labels)), step


def keras_model(task: dict[str, Any]) -> tuple[Step, Any]:
    """The step as Keras has it: `model.train_on_batch` of a compiled model; and that model."""
    model = optimised(models.compile_model(network(task)), task)
    images, labels = batch(task)

    def step() -> float:
        model.reset_metrics()  # else Keras reports a running mean
        return float(model.train_on_batch(images, labels))

    return step, model


def graph(task: dict[str, Any]) -> tuple[Step, Any]:
    """The step as the thesis has it (Listing 6.1): tf.gradients or avm_gradients, in a session; and its graph."""
    gradients, config = tf.gradients, tf.compat.v1.ConfigProto()
    if task["system"] == "tfmem":
        import tfmem

        gradients = partial(tfmem.avm_gradients, memory_budget=budget(task), policy=task["policy"])
        config = tfmem.session_config()
    built = models.build_vgg19_graph(
        task["image_size"],
        task["classes"],
        task["width"],
        task["batch"],
        random_batch=True,
        gradients=gradients,
    )
    session = tf.compat.v1.Session(graph=built.graph, config=config)
    session.run(built.initialize)
    return lambda: float(session.run((built.loss, built.train))[0]), built.graph


def network(task: dict[str, Any]) -> keras.Model:
    return models.build(task["network"], task["image_size"], task["classes"], task["width"])


def batch(task: dict[str, Any]) -> tuple[tf.Tensor, tf.Tensor]:
    """One batch of noise that stays on the device, so that no step waits for data."""
    shape = (task["batch"], task["image_size"], task["image_size"], 3)
    images = tf.random.stateless_normal(shape, seed=(0, 1))
    labels = tf.random.stateless_uniform(shape[:1], (0, 2), 0, task["classes"], tf.int64)
    return images, labels


def budget(task: dict[str, Any]) -> int | None:
    """The cap, which on a GPU is exactly what TensorFlow may use."""
    return None if task["cap"] is None else task["cap"] >> 20 << 20


def stall(library: Library, step: Step) -> int:
    """Median nanoseconds a step's compute waits for copies."""
    library.set_stall_timing(True)
    waited = []
    for _ in range(STALL_STEPS):
        library.reset_counters()
        step()
        waited.append(library.counters().stall_ns)
    library.set_stall_timing(False)
    return int(statistics.median(waited))


def link() -> dict[str, Any]:
    """Bandwidth of the link to the host, each way alone and both at once, in bytes a second."""
    if not tf.config.list_physical_devices("GPU"):
        return {"status": "ok", "spill": asdict(load().spill_bandwidth())}
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("GPU")[0],
        [tf.config.LogicalDeviceConfiguration(memory_limit=1024)],
    )
    tf.config.list_logical_devices()  # starts the device
    runs = [asdict(load().link_bandwidth(size=LINK_BYTES)) for _ in range(3)]
    middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return {"status": "ok", "bytes": LINK_BYTES, "bandwidth": middle, "runs": runs}


def device_name() -> str:
    gpus = tf.config.list_physical_devices("GPU")
    details = tf.config.experimental.get_device_details(gpus[0]) if gpus else {}
    return str(details.get("device_name", "CPU"))


def versions() -> dict[str, str]:
    """The versions of everything that the numbers depend on."""
    build = tf.sysconfig.get_build_info()
    found = {"tensorflow": tf.__version__, "keras": keras.__version__}
    return found | {
        name: str(build[key])
        for name, key in (("cuda_build", "cuda_version"), ("cudnn_build", "cudnn_version"))
        if key in build
    }


def _failure(error: Exception) -> dict[str, Any]:
    """An infeasible budget is a result, with the smallest that would do; anything else is not."""
    smallest = getattr(error, "smallest_budget", None)
    if smallest is not None:
        return {"status": "infeasible", "message": _head(error), "smallest_budget": smallest}
    return {"status": "error", "message": f"{type(error).__name__}: {_head(error)}"}


def _head(error: Exception) -> str:
    """What TensorFlow says of an error, without the Python stack that it puts in between: paths of one machine."""
    said = [line for line in str(error).splitlines() if line.strip() and not line.startswith(" ")]
    return "\n".join(said).replace(" defined at (most recent call last):", "")[:800]


if __name__ == "__main__":
    main()
