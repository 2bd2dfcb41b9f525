"""How far a stitched step strays over many steps, beside what TensorFlow does with its inputs moved by one unit.

    python -m benchmarks.fusion.long_run --output benchmarks/results/fusion_long_run_cpu.json

Copies of a workload train: by TensorFlow; by TensorFlow with each input of floating point moved to a next number, away
from zero and, in other copies, up or down at random; by TensorFlow with the examples of the batch in other orders, so
that sums over the batch are added up in other orders, too; and stitched, as the model plans it. What is compared is how
far variables end from those of the first, the largest distance of all.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fusion.moves import MOVES, next_numbers
from benchmarks.records import machine

WORKLOADS = ("logistic", "mlp")  # whose inputs have the batch first, and whose loss is a mean over it
ORDERS = 5  # of the batch


def main(arguments: list[str] | None = None) -> int:
    """Train, and write what was found.

    Returns:
        1 if a stitched step strays further than TensorFlow with moved inputs and in every other order of the batch, by
        more than one unit in the last place.
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
    return 1 if any(case["stitched"] > most(case) + case["unit"] for case in cases.values()) else 0


def most(case: dict[str, Any]) -> float:
    """The largest distance of TensorFlow from itself."""
    return max(*case["moved"], *case["permuted"])


def strayed(name: str, steps: int) -> dict[str, Any]:
    """The largest distance of a variable from TensorFlow's, of all others (of moved inputs those away from zero first);
    one unit in the last place of the largest number of all; and how many regions there were."""
    import tfmem
    from benchmarks.fusion.workloads import make

    plain, stitched = make(name), make(name)
    moved, permuted = ([make(name) for _ in range(count)] for count in (MOVES, ORDERS))
    step = tfmem.optimize(stitched.step, passes=("fusion",), fusion=tfmem.FusionOptions(tune="off"), cache_directory="")
    seeds = [None, *range(MOVES - 1)]
    inputs = [[next_numbers(np.asarray(each), seed) for each in plain.inputs] for seed in seeds]
    batch = len(plain.inputs[0])
    orders = [np.random.default_rng(seed).permutation(batch) for seed in range(ORDERS)]
    reordered = [[np.asarray(each)[order] for each in plain.inputs] for order in orders]
    for _ in range(steps):
        plain.step(*plain.inputs)
        step(*stitched.inputs)
        for other, given in zip((*moved, *permuted), (*inputs, *reordered), strict=True):
            other.step(*given)

    def distance(other: Any) -> float:
        pairs = zip(other.state, plain.state, strict=True)
        return max(float(np.abs(one.numpy().astype("float64") - two.numpy()).max()) for one, two in pairs)

    largest = max(np.abs(variable.numpy()).max() for variable in plain.state)
    return {
        "stitched": distance(stitched),
        "moved": [distance(other) for other in moved],
        "permuted": [distance(other) for other in permuted],
        "unit": float(np.spacing(largest)),
        "regions": len(tfmem.report(step).regions),
    }


if __name__ == "__main__":
    sys.exit(main())
