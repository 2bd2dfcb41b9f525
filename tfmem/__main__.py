"""The command line, thin over the public API: `python -m tfmem report|explain|devices|cache|optimize`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from custom_ops.errors import TfmemError
from graph_passes.passes.fuse.explain import explain
from graph_passes.report import REPORT_FILE, Report, size
from tfmem import __version__
from tfmem.options import Options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 1 if it failed, with the reason on standard error."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (TfmemError, OSError, ValueError) as error:
        print(f"tfmem {options.command}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tfmem", description="Train under a memory budget, replace recurrent layers, fuse ops."
    )
    parser.add_argument("--version", action="version", version=f"tfmem {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    report = commands.add_parser("report", help="print a report that Report.to_json wrote, or draw it")
    report.add_argument("file", type=Path, metavar="REPORT.json")
    report.add_argument("--rows", type=int, default=10, help="how many offloaded tensors to list (10)")
    report.add_argument("--plot", type=Path, metavar="IMAGE", help="draw memory before and after")
    report.add_argument("--regions", type=Path, metavar="SVG", help="draw the fused regions")
    report.set_defaults(run=_report)

    explain = commands.add_parser("explain", help="say in which fused region an op is, or why it is in none")
    explain.add_argument("file", type=Path, metavar="REPORT.json|SAVED_MODEL")
    explain.add_argument("op", nargs="+", help="the op's name in the graph")
    explain.set_defaults(run=_explain)

    devices = commands.add_parser("devices", help="list devices, their memory and their bandwidth to the host")
    devices.add_argument("--measure", action="store_true", help="print profiles as custom_ops/devices has them")
    devices.set_defaults(run=_devices)

    cache = commands.add_parser("cache", help="say where profiles and GPU kernels are kept, and how large they are")
    cache.add_argument("--clear", action="store_true", help="delete them")
    cache.set_defaults(run=_cache)

    optimize = commands.add_parser("optimize", help="optimise a SavedModel into a new directory")
    optimize.add_argument("path", metavar="SAVED_MODEL")
    optimize.add_argument("--memory-budget", help='"2GiB", bytes, or a fraction such as 0.5; default: no budget')
    optimize.add_argument("--policy", help="offload policy; default: hybrid, or TFMEM_POLICY")
    optimize.add_argument(
        "--passes", nargs="+", metavar="PASS", help="recurrent, fusion, offload; default: recurrent offload"
    )
    optimize.add_argument("--output", help="directory to write; default: SAVED_MODEL_tfmem")
    optimize.set_defaults(run=_optimize)
    return parser


def _report(options: argparse.Namespace) -> None:
    report = _read(options.file)
    if options.regions:
        from tfmem.plot import plot_regions

        print(plot_regions(report, options.regions))
    elif options.plot:
        from tfmem.plot import plot_report

        print(plot_report(report, options.plot))
    else:
        print(report.to_text(options.rows))


def _explain(options: argparse.Namespace) -> None:
    report = _read(options.file)
    for op in options.op:
        print(explain(report, op))


def _read(file: Path) -> Report:
    if file.is_dir():
        file = file / REPORT_FILE
        if not file.is_file():
            raise ValueError(f"'{file.parent.parent}' holds no report of tfmem: pass a SavedModel that tfmem optimised")
    try:
        return Report.from_json(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"'{file}' is not JSON ({error}); expected what Report.to_json wrote") from error


def _devices(options: argparse.Namespace) -> None:
    import tensorflow as tf

    from tfmem.api import make_engine

    if options.measure:
        tf.config.threading.set_intra_op_parallelism_threads(1)
    names = [d.name for d in tf.config.list_logical_devices() if d.device_type in ("CPU", "GPU")]
    for name in names:
        engine = make_engine(Options(device=name[name.index("/device:") :]))
        target, link = engine.target, engine.link
        if options.measure:
            from tfmem.measure import profile

            found = profile(target, link, engine.options.cache_directory)
            print(json.dumps({"_note": f"{target.description}, measured by this command"} | found, indent=1))
            continue
        print(f"{target.name}  {target.description}")
        print(f"  memory     {size(target.memory)}")
        out, back = size(round(link.offload)), size(round(link.prefetch))
        print(f"  link       {out}/s out, {back}/s in, both at once")
        print(f"  profile    {target.profile.name}")


KINDS = ("profiles", "kernels")


def _cache(options: argparse.Namespace) -> None:
    directory = Options.from_env().cache_directory
    if not directory:
        print("no cache: TFMEM_CACHE_DIR is empty")
        return
    folder = Path(directory)
    profiles, kernels = ([file for file in folder.glob(f"{kind}/*/*") if file.is_file()] for kind in KINDS)
    profiles += folder.glob("profiles/*.json")  # an older layout
    profiles += folder.glob("choices/*/*")
    files = [*profiles, *kernels]
    total = size(sum(file.stat().st_size for file in files))
    if options.clear:
        for file in files:
            file.unlink(missing_ok=True)
    counts = f"{_count(len(profiles), 'profile')}, {_count(len(kernels), 'file')} of GPU kernels"
    print(f"{folder}: {counts}, {total}{', deleted' if options.clear else ''}")


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _optimize(options: argparse.Namespace) -> None:
    from tfmem.api import optimize

    chosen: dict[str, Any] = {"policy": options.policy} if options.policy else {}
    if options.passes:
        chosen["passes"] = tuple(options.passes)
    print(optimize(options.path, memory_budget=options.memory_budget, output=options.output, **chosen))


if __name__ == "__main__":
    sys.exit(main())
