"""`optimize` takes an object that holds a training step, and returns the same kind of object; `report` describes it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef

from custom_ops.load import Library, load
from graph_passes.checks import directory, names, shown
from graph_passes.decision import Decision
from graph_passes.errors import AlreadyOptimizedError, GraphError, NoGradientError, OptionsError, StalePlanError
from graph_passes.fates import explain as explained
from graph_passes.passes.recurrent.options import RecurrentOptions
from graph_passes.plan_file import Plan
from graph_passes.report import REPORT_FILE, Report
from tfmem import __version__
from tfmem.budgets import Budgets, DeviceBudgets
from tfmem.capture import concrete_function as functions
from tfmem.capture import keras_functions
from tfmem.capture.captured import Captured, unique
from tfmem.capture.grappler import session_config
from tfmem.capture.strategies import require_no_coordinator
from tfmem.devices import device_names, find_target, links_together
from tfmem.frontends import graph_def as graph_defs
from tfmem.frontends import saved_model
from tfmem.frontends.function import OptimizedFunction
from tfmem.frontends.keras import ModelFunctions, optimize_model
from tfmem.frontends.live_graph import REPORT, optimize_live
from tfmem.options import Options, merged
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
    memory_budget: Budgets = None,
    policy: str | None = None,
    options: Options | None = None,
    fetches: Sequence[str] = (),
    feeds: Sequence[str] = (),
    output: str | os.PathLike[str] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    architectures: Sequence[str] = (),
    **changes: Any,
) -> Any:
    """Rewrite `x` to use less device memory or to run faster.

    Three passes do so (`Options.passes`):

    - "recurrent", on by default, replaces recurrent layers by persistent kernels. Results agree to rounding.
    - "fusion" compiles small ops into few kernels. It is on by default for a `tf.function` or Keras model on a GPU,
      with and without `memory_budget`; tfmem times the fused step, and uses it only if it is faster. Results agree to
      rounding.
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
        memory_budget: bytes, "10GiB", or a fraction of the device's memory, for each device, or a dict of these by
            device, {"GPU:0": "10GiB", "GPU:1": "8GiB"}; None for all that TensorFlow may use of a
            GPU, and no limit on a CPU.
        policy: "optimal" (default), "hybrid", "autovm", "vdnn_all" or "vdnn_conv"; see `tfmem.OffloadOptions`.
        options: all other options; environment variables (`Options.from_env`) if not given.
        fetches: for a tf.Graph, GraphDef or MetaGraphDef: names of the tensors and ops that one training step runs.
            Not needed if the graph holds one step.
        feeds: for a GraphDef: names of its placeholders that are fed.
        output: for a SavedModel: where to write; `<path>_tfmem` if not given.
        plan: what `tfmem.plan` returned, or the path of its file: the step runs by it, within its budget. It is for a
            `tf.function`, a ConcreteFunction, a Keras model or a SavedModel.
        architectures: for a SavedModel: compute capabilities, ("sm_80", "sm_90"), for which kernels of recurrent
            layers, and of fused regions where `passes` names "fusion", are compiled into it; see
            `RecurrentOptions.architectures` and `FusionOptions.architectures`.
        **changes: single fields of `Options`.

    Returns:
        The same kind of object; for a SavedModel, the path of the new one. `tfmem.report` says what was done.

    Raises:
        GraphError: `x` has an unsupported type, or its graph cannot be rewritten (see the subclasses).
        BudgetError: no plan meets the budget (`InfeasibleBudgetError.smallest_budget` should be enough), the budget is
            no size, or the host has too little memory. For a `tf.function` or Keras model the first call raises it.
        StalePlanError: `plan` was made for another graph; raised when the step is first called.
        OptionsError: an option is unknown, or the spill directory is unusable.
        OpLibraryError: the op library is missing or was built for another TensorFlow.
    """
    fetches, feeds = names("fetches", fetches), names("feeds", feeds, "placeholders")
    if output is not None:
        output = directory("output", output)
    called = hasattr(x, "get_concrete_function") or keras_functions.is_keras_model(x)
    given = None if plan is None else checked_plan(plan, x, memory_budget)
    if given is not None:
        memory_budget = given.budget
    chosen = merged(options, memory_budget, policy, **changes)
    if architectures:
        named = tuple(architectures)
        recurrent = replace(chosen.recurrent, architectures=named)
        chosen = replace(chosen, recurrent=recurrent, fusion=replace(chosen.fusion, architectures=named))
    engine = make_engine(chosen, called)
    if given is not None:
        engine = engine.under(replace(engine.settings, plan=given))
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
        raise AlreadyOptimizedError("this function is optimised already; pass the original function")
    if isinstance(x, functions.ConcreteFunction):
        step = ManagedStep(x, engine.under(engine.settings.unobserved()))
        setattr(step.function, REPORT, step.report)
        return step.function
    if hasattr(x, "get_concrete_function"):
        require_no_coordinator()
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


def explain(x: Any, name: str = "") -> str:
    """Say what tfmem did to a step, in one sentence for each of its functions; or what it did to one op or layer.

    Args:
        x: the result of `optimize`, or a `Report`.
        name: an op's name, the name of a tensor that it makes, or a layer's name; "" for all of the step.

    Raises:
        GraphError: there is no report, or nothing of that name in it.
    """
    return explained(x if isinstance(x, Report) else report(x), name)


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
    if isinstance(options.memory_budget, DeviceBudgets):
        options.memory_budget.require_known(device_names())
    mechanism = options.offload.mechanism
    if mechanism not in ("auto", *(("copy", "managed") if target.is_gpu else ("file",))):
        allowed = "'copy', 'managed'" if target.is_gpu else "'file'"
        raise OptionsError(f"{target.name} does not support mechanism='{mechanism}'; use {allowed} or 'auto'")
    asked = options.passes is not None or options.recurrent != RecurrentOptions()
    memory = DeviceMemory(ops, target, options.offload)
    engine = Engine(
        settings=Settings.of(options, target, memory.counts, called),
        library=ops,
        memory=memory,
        meter=Meter(ops, target),
        link=links_together([target], ops, options.offload.spill_directory)[0],
        notices=Notices(asked),
        workers=Workers(f"tfmem {__version__} on TensorFlow {tf.__version__}"),
    )
    if options.memory_budget is not None and "offload" not in engine.settings.passes:
        given = f"memory_budget={options.memory_budget!r}"
        told = f"{given} has no effect without 'offload' in passes={options.passes!r}"
        engine.notices.warn("offload", told, "add 'offload' to passes, or leave the budget out")
    return engine


def checked_plan(plan: Any, x: Any, memory_budget: Budgets) -> Plan:
    """A plan that was given to `optimize`, or the one in a file.

    Raises:
        OptionsError: it is not a plan, it does not fit its budget, `x` takes no plan, or a budget was passed as well.
    """
    if isinstance(plan, str | os.PathLike):
        try:
            plan = Plan.from_json(Path(plan).read_text())
        except (OSError, ValueError) as error:
            raise OptionsError(
                f"plan={os.fspath(plan)!r} cannot be read: {error}; write it again with Plan.to_json"
            ) from error
    if not isinstance(plan, Plan):
        raise OptionsError(f"plan={shown(plan)}: expected what tfmem.plan returned, or the path of its file")
    if plan.budget is None or not plan.feasible:
        why = "was made without a budget" if plan.budget is None else "does not fit its budget"
        raise OptionsError(f"the plan of `{plan.subject}` {why}; make one with tfmem.plan(..., budget=...) that fits")
    if memory_budget is not None:
        raise OptionsError(f"memory_budget={memory_budget!r} was passed with a plan, which has a budget; leave one out")
    if isinstance(x, tf.Graph | tf.compat.v1.GraphDef | tf.compat.v1.MetaGraphDef):
        raise OptionsError(f"plan= is not supported for a {type(x).__name__}; pass memory_budget={plan.budget}")
    return plan


def _optimize_graph_def(captured: Captured, engine: Engine, fetches: Sequence[str]) -> GraphDef:
    planned, found = plan_graph_def(captured, engine, fetches)
    graph_def = graph_defs.restore_graph_def(planned)
    graph_defs.put_report(graph_def, found)
    return graph_def


def _optimize_saved_model(path: str, output: str | os.PathLike[str] | None, engine: Engine) -> str:
    if (file := Path(path, REPORT_FILE)).is_file() and _changed(_parsed(file.read_text(errors="replace"), path)):
        raise AlreadyOptimizedError(f"the SavedModel in '{path}' was optimised before; pass the path of the original")
    reports: list[Report] = []
    without_gradient: dict[str, NoGradientError] = {}
    changed: list[bool] = []
    planned: list[bool] = []  # functions of which the given plan is
    stale: list[StalePlanError] = []

    def managed(concrete: Any, name: str) -> ManagedStep:
        labelled = engine.under(replace(engine.settings.unobserved(), label=f"{Path(path).name}.{name}"))
        try:
            step = ManagedStep(concrete, labelled)
        except StalePlanError as error:  # the plan is for one of the functions
            stale.append(error)
            return ManagedStep(concrete, labelled.under(replace(labelled.settings, plan=None)))
        planned.append(True)
        return step

    def rewrite(concrete: Any, /, *, name: str) -> Any:
        try:
            step = managed(concrete, name)
        except NoGradientError as error:  # inference, beside a training step
            without_gradient[name] = error
            return concrete
        reports.append(step.report)
        changed.append(step.function is not concrete)
        return step.function

    def tell() -> None:
        if stale and not planned:
            raise stale[0]
        for name, error in list(without_gradient.items())[:1]:
            if not reports:
                raise error
            more = f" ({len(without_gradient) - 1} more are, too)" if len(without_gradient) > 1 else ""
            told = f"{name} of '{path}' stays unchanged{more}: {error}"
            engine.notices.warn(
                "not planned", told, "a budget is for training; to replace its recurrent layers, give none"
            )

    target = os.fspath(output) if output is not None else path.rstrip("/") + "_tfmem"
    saved_model.optimize_saved_model(path, target, rewrite, tell)
    if reports:
        found = max(reports, key=_weight)
        if not any(changed) and found.decision is not Decision.FAILED:  # a warning told of that
            note = f"no function of it was changed ({found.decision}): '{target}' is a copy of '{path}'"
            engine.notices.warn(
                "copy", note, f"use the original; tfmem.report('{target}') says why nothing was changed"
            )
            found = replace(found, notes=(*found.notes, note))
        file = Path(target, REPORT_FILE)
        file.parent.mkdir(exist_ok=True)
        notes = tuple(f"unchanged: {name}: {error}" for name, error in without_gradient.items())
        file.write_text(replace(found, notes=(*found.notes, *notes)).to_json())
    return target


def _changed(report: Report) -> bool:
    """Whether something was done to the step of a report."""
    return not report.decision.is_unchanged or bool(report.replaced or report.running)


def _weight(report: Report) -> tuple[int, int]:
    """A key by which the most telling of several reports is shown."""
    return report.peak_before, len(report.replaced)
