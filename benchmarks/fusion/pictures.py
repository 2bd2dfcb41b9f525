"""Draws the regions of each workload's step, as the model plans them: nothing is timed.

python -m benchmarks.fusion.pictures --output DIRECTORY [--only vae nmt]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.fusion.cases import LARGE, MODELS, OTHERS, TEN

ALL = (*TEN, *OTHERS, *LARGE, *MODELS)


def main(arguments: list[str] | None = None) -> int:
    """Write one SVG file for each workload. Returns 1 if one has no regions."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fusion.pictures", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="DIRECTORY", help="where to write NAME.svg")
    parser.add_argument("--only", nargs="+", choices=ALL, default=list(TEN), help="workloads (the ten)")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    paths = {name: options.output / f"{name.replace('/', '_')}.svg" for name in options.only}
    return 1 if [name for name, path in paths.items() if not drawn(name, path)] else 0


def drawn(name: str, path: Path) -> bool:
    """Whether the regions of a workload are in a file now; says on standard output what they are."""
    import tfmem
    from benchmarks.fusion.workloads import make

    workload = make(name)
    step = tfmem.optimize(
        workload.step,
        passes=("recurrent", "fusion"),
        fusion=tfmem.FusionOptions(tune="off"),
        cache_directory="",
    )
    step(*workload.inputs)
    report = tfmem.report(step)
    if not report.regions:
        print(f"{name}: {report.fusion}")
        return False
    tfmem.plot_regions(report, path)
    print(f"{path}: {'; '.join(map(str, report.regions))}")
    return True


if __name__ == "__main__":
    sys.exit(main())
