"""How far a stitched step strays over many steps, beside what TensorFlow does with its inputs moved by one unit.

    python -m benchmarks.fusion.long_run --output benchmarks/results/fusion_long_run_cpu.json

Three copies of a workload train: by TensorFlow; by TensorFlow with each input of floating point moved to the next
number; and stitched, as the model plans it. What is compared is how far apart variables end, the largest over all.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.records import machine

WORKLOADS = ("logistic", "mlp")


def main(arguments: list[str] | None = None) -> int:
    """Train, and write what was found.

    Returns:
        1 if a stitched step strays further than TensorFlow with moved inputs, by more than one unit in the last place.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fusion.long_run", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="where to write the results, as JSON")
    parser.add_argument("--steps", type=int, default=10_000, help="how many (10000)")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=["logistic"], help="workloads (logistic)")
    options = parser.parse_args(arguments)
    cases = {name: strayed(name, options.steps) for name in options.only}
    results = {"machine": machine(), "steps": options.steps, "cases": cases}
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(cases, indent=1))
    return 1 if any(case["stitched"] > case["moved"] + case["unit"] for case in cases.values()) else 0


def strayed(name: str, steps: int) -> dict[str, Any]:
    """The largest distance of a variable from TensorFlow's, of both others; one unit in the last place of the largest
    number of all; and how many regions there were."""
    import tfmem
    from benchmarks.fusion.workloads import make

    plain, moved, stitched = (make(name) for _ in range(3))
    step = tfmem.optimize(stitched.step, passes=("fusion",), fusion=tfmem.FusionOptions(tune="off"), cache_directory="")
    inputs = [next_number(np.asarray(each)) for each in moved.inputs]
    for _ in range(steps):
        plain.step(*plain.inputs)
        moved.step(*inputs)
        step(*stitched.inputs)

    def distance(other: Any) -> float:
        pairs = zip(other.state, plain.state, strict=True)
        return max(float(np.abs(one.numpy().astype("float64") - two.numpy()).max()) for one, two in pairs)

    largest = max(np.abs(variable.numpy()).max() for variable in plain.state)
    return {
        "stitched": distance(stitched),
        "moved": distance(moved),
        "unit": float(np.spacing(largest)),
        "regions": len(tfmem.report(step).regions),
    }


def next_number(values: np.ndarray) -> np.ndarray:
    """Each number of floating point, one unit in its last place further from zero."""
    if values.dtype.kind != "f":
        return values
    return np.nextafter(values, np.copysign(np.inf, values).astype(values.dtype))


if __name__ == "__main__":
    sys.exit(main())
