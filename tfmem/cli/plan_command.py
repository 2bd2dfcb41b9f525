"""`tfmem plan`, `optimize` and `profile`: commands about a model."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from graph_passes.plan_diff import PlanDiff
from graph_passes.plan_file import Plan
from tfmem.cli.output import UsageError, print_json, print_table
from tfmem.cli.sources import FORMS, model_of
from tfmem.plot import plot_plan, require_matplotlib
from tfmem.quiet import start_tensorflow
from tfmem.runtime.progress import shown

NO_FIT = 3
FIRST_BATCH = 32  # that a search of the largest tries


def add_plan(commands: Any) -> argparse.ArgumentParser:
    """`tfmem plan`."""
    text = "say whether a step fits, what a budget costs, and what moves, before anything runs"
    command: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help=text,
        description=f"{text[0].upper()}{text[1:]}.\n\n"
        "  tfmem plan train:model --batch 256 --memory-budget 8GiB --device h100\n"
        "  tfmem plan diff OLD.json NEW.json",
    )
    command.add_argument("source", nargs="+", metavar="SOURCE", help=f"{FORMS}; or: diff OLD NEW")
    command.add_argument("--batch", type=int, help="examples in a step; with --max-batch the first to try (32)")
    command.add_argument("--memory-budget", help='"8GiB", bytes, or a fraction such as 0.5; default: none')
    command.add_argument("--device", default="", help='"GPU:0", or a profile such as h100; default: this machine')
    command.add_argument("--max-batch", action="store_true", help="search the largest batch for the budget")
    command.add_argument("--no-curve", action="store_true", help="do not predict the time of other budgets")
    command.add_argument("--output", type=Path, metavar="PLAN.json", help="save the plan")
    command.add_argument("--plot", type=Path, metavar="IMAGE", help="draw time over budget")
    command.set_defaults(run=_plan)
    return command


def _plan(options: argparse.Namespace) -> int:
    if options.source[0] == "diff":
        if len(options.source) != 3:
            raise UsageError(f"diff takes two plans, not {len(options.source) - 1}: tfmem plan diff OLD.json NEW.json")
        return _diff(Path(options.source[1]), Path(options.source[2]), options.json)
    if len(options.source) != 1:
        raise UsageError(f"found {len(options.source)} models, expected one: {', '.join(options.source)}")
    if options.plot:  # wrong before minutes of planning, not after
        if options.no_curve:
            raise UsageError("--plot draws the curve that --no-curve leaves out: pass one of them")
        require_matplotlib()
    with shown(True, lambda: "starting TensorFlow"):
        start_tensorflow()
        from tfmem.planner import plan

        model = model_of(options.source[0])
    found = plan(
        model,
        options.batch or (FIRST_BATCH if options.max_batch else None),
        budget=options.memory_budget,
        device=options.device,
        curve=not options.no_curve,
        max_batch=options.max_batch,
    )
    if options.output:
        options.output.write_text(found.to_json())
    print(found.to_json() if options.json else found)
    if options.plot:
        plot_plan(found, options.plot)
    for written in filter(None, (options.output, options.plot)):
        print(f"wrote {written}", file=sys.stderr)
    return 0 if found.feasible else NO_FIT


def _diff(old: Path, new: Path, as_json: bool) -> int:
    plans = [_read_plan(file) for file in (old, new)]
    found = PlanDiff.between(*plans)
    if as_json:
        print_json({"equal": plans[0] == plans[1], **dataclasses.asdict(found)})
    else:
        print(found)
    return 0


def _read_plan(file: Path) -> Plan:
    try:
        return Plan.from_json(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"'{file}' is not JSON ({error}); expected what `tfmem plan --output` wrote") from error


def add_optimize(commands: Any) -> argparse.ArgumentParser:
    """`tfmem optimize`."""
    command: argparse.ArgumentParser = commands.add_parser(
        "optimize", help="optimise a SavedModel into a new directory"
    )
    command.add_argument("path", metavar="SAVED_MODEL")
    command.add_argument("--memory-budget", help='"2GiB", bytes, or a fraction such as 0.5; default: no budget')
    command.add_argument("--policy", help="offload policy; default: optimal, or TFMEM_POLICY")
    command.add_argument(
        "--passes", nargs="+", metavar="PASS", help="recurrent, fusion, offload; default: recurrent offload"
    )
    command.add_argument("--plan", type=Path, metavar="PLAN.json", help="carry out a plan that was saved")
    command.add_argument(
        "--architectures", nargs="+", metavar="SM", help="compile GPU kernels for these as well: sm_80 sm_90"
    )
    command.add_argument("--output", help="directory to write; default: SAVED_MODEL_tfmem")
    command.set_defaults(run=_optimize)
    return command


def _optimize(options: argparse.Namespace) -> int:
    with shown(True, lambda: "starting TensorFlow"):
        start_tensorflow()
        from tfmem.api import optimize, report

    chosen: dict[str, Any] = {"policy": options.policy} if options.policy else {}
    if options.passes:
        chosen["passes"] = tuple(options.passes)
    if options.plan:
        chosen["plan"] = options.plan
    if options.architectures:
        chosen["architectures"] = tuple(options.architectures)
    with shown(True, lambda: f"optimising {options.path}"):
        path = optimize(options.path, memory_budget=options.memory_budget, output=options.output, **chosen)
    found = report(path)
    if options.json:
        print_json({"path": path, "report": json.loads(found.to_json())})
    else:
        print(path)
        print(found.headline, file=sys.stderr)
        print(f"tfmem report {path} shows the rest; load it after tfmem.load_ops()", file=sys.stderr)
    return 0


def add_profile(commands: Any) -> argparse.ArgumentParser:
    """`tfmem profile`."""
    text = "run some steps on random data; print measured time and peak beside the predicted ones"
    command: argparse.ArgumentParser = commands.add_parser("profile", help=text, description=f"{text.capitalize()}.")
    command.add_argument("source", metavar="SOURCE", help="a .keras file, or module:name of a compiled Keras model")
    command.add_argument("--batch", type=int, required=True, help="examples in a step")
    command.add_argument("--memory-budget", help='"8GiB", bytes, or a fraction such as 0.5; default: none')
    command.add_argument("--steps", type=int, default=12, help="how many steps to run (12); at least 8")
    command.set_defaults(run=_profile)
    return command


def _profile(options: argparse.Namespace) -> int:
    if options.steps < 8:
        raise UsageError(f"--steps {options.steps}: the first seven steps are plans that are tried; give at least 8")
    with shown(True, lambda: "starting TensorFlow"):
        start_tensorflow()
        from tfmem.step_profile import profile_step

        model = model_of(options.source)
    found = profile_step(model, options.batch, options.memory_budget, options.steps)
    if options.json:
        print_json(found.as_dict())
    else:
        print(found.report.headline)
        print_table(("", "predicted", "measured"), found.rows())
    return 0


COMMANDS = (add_plan, add_optimize, add_profile)
