"""One row of `benchmarks.applications`, in a separate process.

python -m benchmarks.applications.worker TASK RESULT
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import tfmem
from benchmarks.applications.__main__ import SHARES
from custom_ops.load import load
from graph_passes import pipeline
from graph_passes.graph import serde
from graph_passes.graph.ir import parse_input
from graph_passes.passes.offload.plan import Probing
from tfmem.api import make_engine
from tfmem.capture.concrete_function import capture_concrete, restore_concrete
from tfmem.capture.grappler import run_grappler
from tfmem.devices import memory

STEPS = 10
CLASSES = 10
CPU = "/device:CPU:0"


def main() -> int:
    """Do the task of the command line."""
    task, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    tf.keras.utils.set_random_seed(1)
    model = network(task)
    if task["kind"] == "planned":
        found = planned(model, task)
    elif task["kind"] == "plain":
        found = plain(model, task)
    else:
        found = under(model, task)
    path.write_text(json.dumps(found))
    return 0


def network(task: dict[str, Any]) -> Any:
    """The compiled model."""
    build = getattr(tf.keras.applications, task["name"])
    model = build(weights=None, input_shape=(task["image"], task["image"], 3), classes=CLASSES)
    model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
    return model


def data(task: dict[str, Any]) -> tuple[Any, Any]:
    """One batch, the same each time."""
    images = np.random.RandomState(0).rand(task["batch"], task["image"], task["image"], 3)
    return images.astype("float32"), np.arange(task["batch"]) % CLASSES


def planned(model: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Plans from estimates for shares of the estimated peak, put into the traced step; nothing runs."""
    images, labels = data(task)
    model.optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
    def step(images: Any, labels: Any) -> Any:
        return model.train_step((images, labels))

    traced = step.get_concrete_function(tf.TensorSpec(images.shape, tf.float32), tf.TensorSpec(labels.shape, tf.int64))
    engine = make_engine(tfmem.Options(memory_budget=0.9))
    captured = run_grappler(capture_concrete(traced), device="CPU")
    inferred = restore_concrete(traced, captured, captured.graph_def, {})
    graph = serde.from_graph_def(captured.graph_def, inferred=inferred.graph)
    fetches = [parse_input(name)[0] for name in captured.fetches]
    read = pipeline.Step.read(graph, captured.creation_order, fetches, merging=True, counted=engine.settings.counted)
    timeline = read.timeline(engine.estimate(workspace=True))
    options, plans, edited = engine.settings.options.offload, dict[str, Any](), graph
    for share in SHARES:
        budget, began = timeline.peak * share // 100, time.monotonic()
        try:
            plan = pipeline.plan_step(read, timeline, engine.link, budget, options)
            widest = pipeline.plan_step(read, timeline, engine.link, budget, options, widest=True)
        except tfmem.InfeasibleBudgetError as error:
            plans[str(share)] = {"budget": budget, "smallest": error.smallest_budget}
            continue
        edited = pipeline.edit_step(read, timeline, plan, options)  # verified: acyclic, every input there
        pipeline.edit_step(read, timeline, widest, options, Probing(1, engine.settings.target.name))
        seconds = round(time.monotonic() - began, 2)
        plans[str(share)] = {
            "budget": budget,
            "planned": plan.after.peak,
            "moves": len(plan.moves),
            "seconds": seconds,
        }
    restore_concrete(traced, captured, serde.to_graph_def(edited, captured.graph_def), {})  # TensorFlow takes it
    return {"status": "ok", "estimate": timeline.peak, "ops": len(read.order), "plans": plans}


def plain(model: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Ten steps without tfmem, and ten more from the same weights."""
    model.optimizer.build(model.trainable_variables)
    start = [(variable, np.array(variable)) for variable in model.variables]
    first = train(model, task)
    for variable, value in start:
        variable.assign(value)
    return {"status": "ok", **first, "again": train(model, task)["losses"]}


def under(model: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Ten steps under the budget, or how it was refused."""
    model = tfmem.optimize(model, memory_budget=int(task["budget"]), passes=("recurrent", "offload"))
    try:
        found = train(model, task)
    except tfmem.InfeasibleBudgetError as error:
        return {"status": "refused", "smallest": error.smallest_budget, "message": str(error)}
    report = tfmem.report(model)
    return {
        "status": "ok",
        **found,
        "planned": report.peak_predicted,
        "reported": report.peak_measured,
        "decision": report.decision,
        "notes": report.notes,
    }


def train(model: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Ten steps: their losses and seconds, and the peak of the last three, which run as every later one will."""
    images, labels = data(task)
    library = load()
    if memory(library, CPU).bytes_in_use < 0:
        raise RuntimeError("TensorFlow's allocator counts no bytes, because oneDNN is off: set TF_ENABLE_ONEDNN_OPTS=1")
    losses, seconds, peak = [], [], 0
    for step in range(STEPS):
        began = time.monotonic()
        memory(library, CPU, reset=True)
        losses.append(float(model.train_on_batch(images, labels)))
        if step >= STEPS - 3:
            peak = max(peak, memory(library, CPU).peak_bytes)
        seconds.append(round(time.monotonic() - began, 3))
    return {"losses": losses, "seconds": seconds, "peak": peak}


if __name__ == "__main__":
    sys.exit(main())
