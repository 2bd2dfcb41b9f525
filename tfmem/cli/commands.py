"""`tfmem report`, `explain`, `doctor`, `devices` and `cache`: commands about reports and about the machine."""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from graph_passes.device_report import many, size
from graph_passes.fates import explain
from graph_passes.plan_file import Plan
from graph_passes.report import REPORT_FILE, Report
from tfmem.cli.output import print_json, print_table
from tfmem.options import Options
from tfmem.quiet import start_tensorflow
from tfmem.runtime.progress import shown

KINDS = ("profiles", "kernels")
REPORTS = "REPORT.json|PLAN.json|SAVED_MODEL"


def add_explain(commands: Any) -> argparse.ArgumentParser:
    """`tfmem explain`."""
    text = "say in a sentence what tfmem did to a step, a layer or an op"
    command: argparse.ArgumentParser = commands.add_parser("explain", help=text, description=f"{text.capitalize()}.")
    command.add_argument("file", type=Path, metavar=REPORTS)
    command.add_argument("name", nargs="*", help="a layer's or an op's name; without one: the step")
    command.set_defaults(run=_explain)
    return command


def _explain(options: argparse.Namespace) -> None:
    report = read_report(options.file)
    found = {name: explain(report, name) for name in options.name or [""]}
    if options.json:
        print_json(found)
    else:
        print("\n".join(found.values()))


def add_report(commands: Any) -> argparse.ArgumentParser:
    """`tfmem report`."""
    command: argparse.ArgumentParser = commands.add_parser(
        "report", help="print a report that Report.to_json wrote, or draw it"
    )
    command.add_argument("file", type=Path, metavar=REPORTS)
    command.add_argument("--rows", type=int, default=10, help="how many offloaded tensors to list (10)")
    command.add_argument("--html", type=Path, metavar="PAGE", help="write one page with all pictures")
    command.add_argument("--plot", type=Path, metavar="IMAGE", help="draw memory before and after")
    command.add_argument("--regions", type=Path, metavar="SVG", help="draw the fused regions")
    command.set_defaults(run=_report)
    return command


def _report(options: argparse.Namespace) -> None:
    report, written = read_report(options.file), []
    if options.html:
        from tfmem.html_report import write_html

        written.append(write_html(report, options.html))
    if options.regions:
        from tfmem.plot import plot_regions

        written.append(plot_regions(report, options.regions))
    if options.plot:
        from tfmem.plot import plot_report

        written.append(plot_report(report, options.plot))
    if options.json:
        print(report.to_json())
    elif written:
        print("\n".join(map(str, written)))
    else:
        print(report.to_text(options.rows))


def read_report(file: Path) -> Report:
    """The report in a file, in a plan's file, or in a SavedModel.

    Raises:
        OSError, ValueError: there is none.
    """
    if file.is_dir():
        file = file / REPORT_FILE
        if not file.is_file():
            raise ValueError(f"'{file.parent.parent}' holds no report of tfmem: pass a SavedModel that tfmem optimised")
    text = file.read_text()
    try:
        if '"plan_format"' in text[:200]:
            report = Plan.from_json(text).report
            if report is None:
                raise ValueError(
                    f"the plan in '{file}' meets no budget, so there is nothing to show; make one for a larger budget"
                )
            return report
        return Report.from_json(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"'{file}' is not JSON ({error}); expected what Report.to_json wrote") from error


def add_doctor(commands: Any) -> argparse.ArgumentParser:
    """`tfmem doctor`."""
    text = "say what works on this machine, what does not, and what to do"
    command: argparse.ArgumentParser = commands.add_parser("doctor", help=text, description=f"{text.capitalize()}.")
    command.set_defaults(run=_doctor)
    return command


def _doctor(options: argparse.Namespace) -> int:
    from tfmem.doctor import FindingState, Surroundings, examine, worst

    with shown(True, lambda: "looking at this machine"):
        with suppress(Exception):  # a finding says what is wrong
            start_tensorflow()
        findings = list(examine(Surroundings.here()))
    if options.json:
        print_json([asdict(each) for each in findings])
    else:
        marks = {FindingState.WORKS: "ok", FindingState.LACKS: "-", FindingState.BROKEN: "BROKEN"}
        print_table(("", "", "found", "what to do"), [(marks[f.state], f.what, f.found, f.cure) for f in findings])
        broken = sum(each.state is FindingState.BROKEN for each in findings)
        lacking = sum(each.state is FindingState.LACKS for each in findings)
        works = "tfmem works here" if not broken else f"{many(broken, 'part')} broken"
        print(f"{works}; {many(lacking, 'part')} missing that tfmem can do without")
    return 1 if worst(findings) is FindingState.BROKEN else 0


def add_devices(commands: Any) -> argparse.ArgumentParser:
    """`tfmem devices`."""
    command: argparse.ArgumentParser = commands.add_parser(
        "devices", help="list devices, their memory and their bandwidth to the host"
    )
    command.add_argument("--measure", action="store_true", help="print profiles as custom_ops/devices has them")
    command.set_defaults(run=_devices)
    return command


def _devices(options: argparse.Namespace) -> None:
    with shown(True, lambda: "starting TensorFlow"):
        start_tensorflow(threads=1 if options.measure else None)  # a profile has costs of one thread

        from tfmem.api import make_engine
        from tfmem.devices import device_names

    found = []
    for name in device_names():
        engine = make_engine(replace(Options.from_env(), device=name))
        target, link = engine.settings.target, engine.link
        if options.measure:
            from tfmem.measure import profile

            with shown(True, lambda device=name: f"measuring {device}"):  # type: ignore[misc]
                measured = profile(target, link, engine.settings.options.cache_directory)
            print_json({"_note": f"{target.description}, measured by this command"} | measured)
            continue
        found.append(
            {
                "name": target.plain_name,
                "description": target.description,
                "memory": target.memory,
                "bytes_out_per_second": round(link.offload),
                "bytes_in_per_second": round(link.prefetch),
                "profile": target.profile.name,
            }
        )
    if options.json:
        print_json(found)
    elif found:
        header = ("device", "what", "memory", "to the host", "from the host", "profile")
        print_table(
            header,
            [
                (
                    str(each["name"]),
                    str(each["description"]),
                    size(int(str(each["memory"]))),
                    f"{size(int(str(each['bytes_out_per_second'])))}/s",
                    f"{size(int(str(each['bytes_in_per_second'])))}/s",
                    str(each["profile"]),
                )
                for each in found
            ],
        )


def add_cache(commands: Any) -> argparse.ArgumentParser:
    """`tfmem cache`."""
    command: argparse.ArgumentParser = commands.add_parser(
        "cache", help="say where profiles and GPU kernels are kept, and how large they are"
    )
    command.add_argument("--clear", action="store_true", help="delete them")
    command.set_defaults(run=_cache)
    return command


def _cache(options: argparse.Namespace) -> None:
    directory = Options.from_env().cache_directory
    if not directory:
        print(json.dumps({"directory": None}) if options.json else "no cache: TFMEM_CACHE_DIR is empty")
        return
    folder = Path(directory)
    profiles, kernels = ([file for file in folder.glob(f"{kind}/*/*") if file.is_file()] for kind in KINDS)
    profiles += folder.glob("profiles/*.json")  # an older layout
    profiles += [
        file for kind in ("choices", "graphs", "plans") for file in folder.glob(f"{kind}/*/*") if file.is_file()
    ]
    files = [*profiles, *kernels]
    total = sum(file.stat().st_size for file in files)
    if options.clear:
        for file in files:
            file.unlink(missing_ok=True)
    if options.json:
        counts = {"profiles": len(profiles), "kernels": len(kernels)}
        print_json({"directory": directory, **counts, "bytes": total, "deleted": bool(options.clear)})
        return
    words = f"{many(len(profiles), 'file')} of profiles and plans, {many(len(kernels), 'file')} of GPU kernels"
    print(f"{folder}: {words}, {size(total)}{', deleted' if options.clear else ''}")


COMMANDS = (add_explain, add_report, add_doctor, add_devices, add_cache)
