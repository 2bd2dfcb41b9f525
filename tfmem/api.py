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
from tfmem import __version__
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
from tfmem.runtime.workers import Workers
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
    """Rewrite `x` to use less device memory or to run faster.

    Three passes do so (`Options.passes`):

    - "recurrent", on by default, replaces recurrent layers by persistent kernels. Results agree to rounding.
    - "fusion" compiles small ops into few kernels. It is on by default for a `tf.function` or Keras model on a GPU
      without `memory_budget`; the fused step is timed and used only if it is faster. Results agree to rounding.
    - "offload", on by default, keeps a training step within `memory_budget`: it copies activations to host memory (on
      a CPU to files) until their gradient needs them, or recomputes them. Results are equal to the bit if TensorFlow
      picks the same kernels. A step that fits is not changed.

    A `tf.Graph` and a Keras model are modified in place; other objects are returned new. A `tf.function` or Keras model
    is planned in its first calls, which are slower.

    Args:
        x: one of
            a `tf.Graph` that no session has run; run it with `tfmem.session_config()`,
            a `GraphDef` or `MetaGraphDef`,
            a `tf.function` or `ConcreteFunction`,
            a Keras model, of Keras 3 or `tf_keras`; compile it first to use `fit`,
            the path of a SavedModel.
        memory_budget: bytes, "10GiB", or a fraction of the device's memory; None for all that TensorFlow may use of a
            GPU, and no limit on a CPU.
        policy: "hybrid" (default), "autovm", "vdnn_all" or "vdnn_conv"; see `tfmem.OffloadOptions`.
        options: all other options; environment variables (`Options.from_env`) if not given.
        fetches: for a tf.Graph, GraphDef or MetaGraphDef: names of the tensors and ops that one training step runs.
            Not needed if the graph holds one step.
        feeds: for a GraphDef: names of its placeholders that are fed.
        output: for a SavedModel: where to write; `<path>_tfmem` if not given.
        **changes: single fields of `Options`.

    Returns:
        The same kind of object; for a SavedModel, the path of the new one. `tfmem.report` says what was done.

    Raises:
        GraphError: `x` has an unsupported type, or its graph cannot be rewritten (see the subclasses).
        BudgetError: no plan meets the budget (`InfeasibleBudgetError.smallest_budget` should be enough), the budget is
            no size, or the host has too little memory. For a `tf.function` or Keras model the first call raises it.
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
    """The report of what `optimize` did to `x`.

    Args:
        x: the result of `optimize`; for a SavedModel its path. Three kinds of objects are special:
            a GraphDef or MetaGraphDef carries a report only if tfmem changed it or has a note about it;
            a wrapped optimizer's report is about the step that used it;
            a Keras model's report is about its training; `others` holds the reports of evaluation and prediction.
            Of several traces, the report shows the one that needs the most memory.

    Raises:
        GraphError: `x` was not optimised, has no report, or has not run yet.
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
    raise GraphError(f"this {type(x).__name__} has no report; pass what tfmem.optimize returned, after its first step")


def explain(x: Any, op: str) -> str:
    """One sentence that says in which fused region an op is, or why it is in none.

    Args:
        x: the result of `optimize`, or a `Report`.
        op: the op's name, or the name of a tensor that it makes.

    Raises:
        GraphError: there is no report, the fusion pass did not run, or there was no such op when it did.
    """
    return explained(x if isinstance(x, Report) else report(x), op)


def _parsed(text: str, where: str) -> Report:
    try:
        return Report.from_json(text)
    except ValueError as error:
        raise GraphError(f"the report in {where} cannot be read ({error}); optimise the original again") from error


def load_ops() -> Library:
    """Register tfmem's ops with TensorFlow; call it before you load an optimised SavedModel.

    Raises:
        OpLibraryError: the library is missing or was built for another TensorFlow.
    """
    return load()


def make_engine(options: Options, called: bool = False) -> Engine:
    """The device, its link and the ops, for `options`; checks the options that depend on the device.

    Args:
        options: the user's.
        called: whether this process calls the optimised object again and again.
    """
    ops = load()
    target = find_target(options.device, ops)
    mechanism = options.offload.mechanism
    if mechanism not in ("auto", *(("copy", "managed") if target.is_gpu else ("file",))):
        allowed = "'copy', 'managed'" if target.is_gpu else "'file'"
        raise OptionsError(f"{target.name} does not support mechanism='{mechanism}'; use {allowed} or 'auto'")
    asked = options.passes is not None or options.recurrent != RecurrentOptions()
    memory = DeviceMemory(ops, target, options.offload)
    engine = Engine(
        **vars(Settings.of(options, target, memory.counts, called)),
        library=ops,
        memory=memory,
        meter=Meter(ops, target),
        link=MeasuredLink(target, ops, options.offload.spill_directory),
        notices=Notices(asked),
        workers=Workers(f"tfmem {__version__} on TensorFlow {tf.__version__}"),
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
    """A key by which the most telling of several reports is shown."""
    return report.peak_before, len(report.replaced)
