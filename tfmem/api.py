"""`optimize`: whatever holds a training step goes in, the same kind of object comes out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef

from custom_ops.load import Library, load
from graph_passes.checks import directory, names
from graph_passes.decision import Decision
from graph_passes.errors import AlreadyOptimizedError, GraphError, NoGradientError, OptionsError
from graph_passes.passes.fuse.explain import explain as explained
from graph_passes.passes.recurrent.options import RecurrentOptions
from graph_passes.report import REPORT_FILE, Report
from tfmem.capture import concrete_function as functions
from tfmem.capture import keras_functions
from tfmem.capture.captured import Captured, unique
from tfmem.capture.grappler import session_config
from tfmem.devices import MeasuredLink, find_target
from tfmem.frontends import graph_def as graph_defs
from tfmem.frontends import saved_model
from tfmem.frontends.function import OptimizedFunction
from tfmem.frontends.keras import ModelFunctions, optimize_model
from tfmem.frontends.live_graph import REPORT, optimize_live
from tfmem.options import Budget, Options, merged
from tfmem.runtime.device_memory import DeviceMemory
from tfmem.runtime.engine import Engine
from tfmem.runtime.measured_call import Meter
from tfmem.runtime.notices import Notices
from tfmem.runtime.settings import Settings
from tfmem.steps.managed_step import ManagedStep
from tfmem.steps.static_planning import plan_graph_def

__all__ = ["explain", "load_ops", "make_engine", "optimize", "report", "session_config"]


def optimize(
    x: Any,
    *,
    memory_budget: Budget = None,
    policy: str | None = None,
    options: Options | None = None,
    fetches: Sequence[str] = (),
    feeds: Sequence[str] = (),
    output: str | os.PathLike[str] | None = None,
    **changes: Any,
) -> Any:
    """Replace recurrent layers by persistent kernels, and make the training step in `x` run within a memory budget.

    A recurrence whose step is made of products with the states and elementwise ops becomes one kernel that keeps its
    weights on the chip; sums are added up in another order, so results agree to rounding.

    Activations that wait for their gradient op are moved to host memory (to spill files on a machine without a GPU) and
    brought back in time; that alone changes no bit. A step that fits is left as it is.

    Args:
        x: one of
            a `tf.Graph` (edited in place, before a session runs it; run it with `tfmem.session_config()`),
            a `GraphDef` or `MetaGraphDef`,
            a `tf.function` or `ConcreteFunction`,
            a Keras model, of Keras 3 or `tf_keras`: `fit`, `evaluate` and `predict`; to fit, compile it first,
            the path of a SavedModel.
        memory_budget: bytes, "10GiB", or a fraction of the device's memory; see `tfmem.Options`.
        policy: "hybrid" (default), "autovm", "vdnn_all" or "vdnn_conv"; see `tfmem.OffloadOptions`.
        options: everything else; environment variables (`Options.from_env`) if not given.
        fetches: for a tf.Graph, GraphDef or MetaGraphDef: names of the tensors and ops that one training step runs.
            Not needed where the graph holds one step.
        feeds: for a GraphDef: names of the placeholders it is fed.
        output: for a SavedModel: where to write; `<path>_tfmem` if not given.
        **changes: single fields of `Options`.

    Returns:
        The same kind of object. `tfmem.report` tells what was done.

    Raises:
        GraphError: `x` is no such object, or its graph cannot be rewritten (see the subclasses).
        BudgetError: the budget is unusable, or no plan can meet it; the message gives the smallest one that works.
        OptionsError: an option is unknown, or the spill directory is unusable.
        OpLibraryError: the op library is missing or was built for another TensorFlow.
    """
    fetches, feeds = names("fetches", fetches), names("feeds", feeds, "placeholders")
    if output is not None:
        output = directory("output", output)
    called = hasattr(x, "get_concrete_function") or keras_functions.is_keras_model(x)
    engine = make_engine(merged(options, memory_budget, policy, **changes), called)
    return optimize_with(engine, x, fetches, feeds, output)


def optimize_with(
    engine: Engine, x: Any, fetches: Sequence[str] = (), feeds: Sequence[str] = (), output: str | None = None
) -> Any:
    """`optimize`, with what `make_engine` makes of the options; the arguments are checked.

    Args:
        engine: the options, on a device.
        x, fetches, feeds, output: see `optimize`.
    """
    if isinstance(x, str | os.PathLike):
        return _optimize_saved_model(os.fspath(x), output, engine)
    if isinstance(x, tf.Graph):
        optimize_live(x, engine, None, fetches)
        return x
    if isinstance(x, tf.compat.v1.GraphDef):
        captured = graph_defs.capture_graph_def(x, feeds or None, unique([*fetches, *graph_defs.unread(x)]))
        return _optimize_graph_def(captured, engine, fetches)
    if isinstance(x, tf.compat.v1.MetaGraphDef):
        captured = graph_defs.capture_meta_graph(x, feeds or None, unique([*fetches, *graph_defs.named(x)]))
        return graph_defs.restore_meta_graph(x, _optimize_graph_def(captured, engine, fetches))
    if isinstance(x, OptimizedFunction):
        raise AlreadyOptimizedError("this function is optimised already; optimise the one it was made of")
    if isinstance(x, functions.ConcreteFunction):
        step = ManagedStep(x, engine.unobserved())
        setattr(step.function, REPORT, step.report)
        return step.function
    if hasattr(x, "get_concrete_function"):
        return OptimizedFunction(x, engine)
    if keras_functions.is_keras_model(x):
        setattr(x, REPORT, optimize_model(x, engine))
        return x
    raise GraphError(
        f"cannot optimise a {type(x).__name__}; expected a tf.Graph, GraphDef, MetaGraphDef, tf.function, "
        "ConcreteFunction, a compiled Keras model or the path of a SavedModel"
    )


def report(x: Any) -> Report:
    """What `optimize` did to `x`.

    Args:
        x: what `optimize` returned; of a SavedModel, its path. In a GraphDef or MetaGraphDef a node carries the report:
            there is none where nothing was changed and there is nothing to say of it. A wrapped optimizer's is of the
            step that it was used in. Of several traces, the one that
            needs the most memory is reported; a Keras model's report is of its training, with what was done to
            evaluation and prediction in `others`.

    Raises:
        GraphError: `x` was not optimised, or its step has not run yet, or what is stored with it is no report.
    """
    if isinstance(x, tf.compat.v1.GraphDef | tf.compat.v1.MetaGraphDef):
        return _parsed(graph_defs.report_in(getattr(x, "graph_def", x)), "the graph")
    if isinstance(x, OptimizedFunction):
        return x.report
    if isinstance(x, str | os.PathLike) and (file := Path(x, REPORT_FILE)).is_file():
        return _parsed(file.read_text(errors="replace"), str(file))
    holder = getattr(x, REPORT, None)
    if isinstance(holder, ModelFunctions):
        return holder.report
    if isinstance(holder, Report):
        return holder
    raise GraphError(f"no report: this {type(x).__name__} was not optimised by tfmem")


def explain(x: Any, op: str) -> str:
    """In which region an op is, or why it is in none, in one sentence.

    Args:
        x: what `optimize` returned, or a `Report`.
        op: the op's name, or that of a tensor that it makes.

    Raises:
        GraphError: there is no report, the fusion pass did not run, or there was no such op when it did.
    """
    return explained(x if isinstance(x, Report) else report(x), op)


def _parsed(text: str, where: str) -> Report:
    try:
        return Report.from_json(text)
    except ValueError as error:
        raise GraphError(f"what {where} holds as the report of tfmem is none ({error}); optimise it again") from error


def load_ops() -> Library:
    """Register tfmem's ops with TensorFlow, as loading an exported SavedModel needs.

    Raises:
        OpLibraryError: the library is missing or was built for another TensorFlow.
    """
    return load()


def make_engine(options: Options, called: bool = False) -> Engine:
    """The device, its link and the ops, for `options`; what depends on the device is checked here.

    Args:
        options: the user's.
        called: whether what is optimised is called by this process, again and again.
    """
    ops = load()
    target = find_target(options.device, ops)
    mechanism = options.offload.mechanism
    if mechanism not in ("auto", *(("copy", "managed") if target.is_gpu else ("file",))):
        allowed = "'copy', 'managed'" if target.is_gpu else "'file'"
        raise OptionsError(f"mechanism='{mechanism}' is not for {target.name}; use {allowed} or 'auto'")
    asked = options.passes is not None or options.recurrent != RecurrentOptions()
    memory = DeviceMemory(ops, target, options.offload)
    engine = Engine(
        **vars(Settings.of(options, target, memory.counts, called)),
        library=ops,
        memory=memory,
        meter=Meter(ops, target),
        link=MeasuredLink(target, ops, options.offload.spill_directory),
        notices=Notices(asked),
    )
    if options.memory_budget is not None and "offload" not in engine.passes:
        given = f"memory_budget={options.memory_budget!r}"
        engine.notices.warn("offload", f"tfmem: {given} has no effect without 'offload' in passes={options.passes!r}")
    return engine


def _optimize_graph_def(captured: Captured, engine: Engine, fetches: Sequence[str]) -> GraphDef:
    planned, found = plan_graph_def(captured, engine, fetches)
    graph_def = graph_defs.restore_graph_def(planned)
    graph_defs.put_report(graph_def, found)
    return graph_def


def _optimize_saved_model(path: str, output: str | os.PathLike[str] | None, engine: Engine) -> str:
    reports: list[Report] = []
    without_gradient: dict[str, NoGradientError] = {}
    changed: list[bool] = []

    def rewrite(concrete: Any) -> Any:
        try:
            step = ManagedStep(concrete, engine.unobserved())
        except NoGradientError as error:  # inference, beside a training step
            without_gradient[tf.compat.as_str(concrete.name)] = error
            return concrete
        reports.append(step.report)
        changed.append(step.function is not concrete)
        return step.function

    def tell() -> None:
        for name, error in list(without_gradient.items())[:1]:
            if not reports:
                raise error
            more = f" ({len(without_gradient) - 1} more are, too)" if len(without_gradient) > 1 else ""
            engine.notices.warn("not planned", f"tfmem: {name} of '{path}' stays unchanged{more}: {error}")

    target = os.fspath(output) if output is not None else path.rstrip("/") + "_tfmem"
    saved_model.optimize_saved_model(path, target, rewrite, tell)
    if reports:
        found = max(reports, key=_weight)
        if not any(changed) and found.decision is not Decision.FAILED:  # a warning told of that
            why = "it was optimised before" if Path(path, REPORT_FILE).is_file() else found.decision
            note = f"no function of it was changed ({why}): '{target}' is a copy of '{path}'"
            engine.notices.warn("copy", f"tfmem: {note}; see tfmem.report('{target}')")
            found = replace(found, notes=(*found.notes, note))
        file = Path(target, REPORT_FILE)
        file.parent.mkdir(exist_ok=True)
        notes = tuple(f"unchanged: {name}: {error}" for name, error in without_gradient.items())
        file.write_text(replace(found, notes=(*found.notes, *notes)).to_json())
    return target


def _weight(report: Report) -> tuple[int, int]:
    """Of several reports, the one that says most is shown."""
    return report.peak_before, len(report.replaced)
