"""The ten workloads under TensorFlow's executor, XLA in its two modes, and tfmem, interleaved in one process for each.

    python -m benchmarks.fusion --output benchmarks/results/fusion_cpu.json
    python -m benchmarks.fusion --quick --only logistic
    python -m benchmarks.fusion --table benchmarks/results/fusion_cpu.json

A step's time ends when its loss (of inference: one scalar) is on the host. Grappler's remapper and TF32 are set alike
for all systems, and stand in the results: the remapper is off, because XLA cannot compile what it makes, unless
`--remapper`; TF32 is on, as it is TensorFlow's default, unless `--no-tf32`. With TF32 losses are not held to a bound.
Each workload has a separate process, and a row in the results; rows that are there are not run again, so that a
benchmark can be spread over several sessions. On a machine that others use, `--patience` drops rounds that they
disturbed. What needs other flags of XLA is another run: XLA_FLAGS and TF_XLA_FLAGS
are kept with a row, whose name then ends in `--label`."""

from __future__ import annotations

import os
import sys

from benchmarks.fusion import tables
from benchmarks.fusion.cases import LARGE, MODELS, OTHERS, SYSTEMS, TEN, Case, settings, task_of
from benchmarks.fusion.compare import wrong
from benchmarks.records import begun, save
from benchmarks.runs import asked, command_line, in_process, waiting

WORKER = "benchmarks.fusion.worker"
ON_A_CPU = "--tf_xla_cpu_global_jit"  # without it XLA's clustering is for GPUs only; alone it turns nothing on


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for, and print the tables. Returns 1 if a workload failed or tfmem was wrong."""
    parser = command_line("fusion", __doc__, "fusion.json")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="what to measure (all)")
    parser.add_argument("--warm-up", type=int, default=50, help="steps before those that are timed (50)")
    parser.add_argument("--steps", type=int, default=200, help="timed steps (200)")
    parser.add_argument("--block", type=int, default=20, help="timed steps of a system before the next's turn (20)")
    parser.add_argument("--parity", type=int, default=100, help="steps after which losses are compared (100)")
    parser.add_argument("--settle", type=float, default=60, help="seconds to wait at most until tfmem has decided (60)")
    parser.add_argument(
        "--patience", type=float, default=0, help="seconds that a workload waits for other processes to be idle (0)"
    )
    parser.add_argument("--large", action="store_true", help="tensors of a gigabyte, too, against a copy's bandwidth")
    parser.add_argument("--models", action="store_true", help="ResNet-50 and BERT-base of Keras, too")
    parser.add_argument("--remapper", action="store_true", help="leave Grappler's remapper on")
    parser.add_argument("--no-tf32", action="store_true", help="products of float32 in float32")
    parser.add_argument("--deterministic", action="store_true", help="with TensorFlow's op determinism")
    parser.add_argument("--quick", action="store_true", help="5 steps of warm-up, 20 timed, 10 compared")
    parser.add_argument("--label", default="", help="ending of the rows' names, where flags of XLA are set")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one workload (600)")
    parser.set_defaults(total_seconds=3600)
    options, cases = asked(parser, arguments, [Case(name) for name in (*TEN, *OTHERS, *LARGE, *MODELS)], tables.table)
    if min(options.warm_up, options.steps, options.block, options.parity) < 1:
        parser.error("--warm-up, --steps, --block and --parity must be 1 or more")
    if not cases:
        return 0
    options.systems = [name for name in SYSTEMS if name == "graph" or name in options.systems]
    if options.quick:
        options.warm_up, options.steps, options.block, options.parity, options.settle = 5, 20, 10, 10, 0.0
    results = begun(options)
    failed = 0
    wanted = (*TEN, *OTHERS, *(LARGE if options.large else ()), *(MODELS if options.models else ()))
    settled = [Case(case.workload, settings(options)) for case in cases if options.only or case.workload in wanted]
    for case in waiting(settled, results, options):
        outcome = in_process(WORKER, task_of(case, options), options.timeout, TF_XLA_FLAGS=xla_flags())
        results["cases"][case.name] = outcome
        save(results, options.output)
        print(tables.line(case.name, outcome), flush=True)
        failed += outcome["status"] != "ok" or wrong(outcome)
    print("\n".join(tables.table(results["cases"])))
    return 1 if failed else 0


def xla_flags() -> str:
    """The flags of this process, with clustering allowed on a CPU."""
    return f"{os.environ.get('TF_XLA_FLAGS', '')} {ON_A_CPU}".strip()


if __name__ == "__main__":
    sys.exit(main())
