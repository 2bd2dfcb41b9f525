r"""How far elementwise ops in a region are from TensorFlow's own kernels and from the exact values, op by op.

    python -m benchmarks.fusion.ulps --output benchmarks/results/fusion_ulps_cpu.json
    python -m benchmarks.fusion.ulps --table benchmarks/results/fusion_ulps_cpu.json \
        --document docs/benchmarks_elementwise_cpu.md

Runs on a CPU, or on the GPU if TensorFlow finds one. Each op runs in a region and by TensorFlow's executor, on the same
65,536 numbers of each class: normal numbers, half of them near 1 and half of any size that floats have; denormal
numbers; and special values (zeros, infinities, NaN, the largest and the smallest numbers, bounds of the ops) in pairs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.fusion.elementwise import OPS
from benchmarks.offload.tables import write
from benchmarks.records import FORMAT, load, machine, save

Array = NDArray[Any]
COUNT = 65_536
DTYPES = ("float32", "float64", "float16", "bfloat16")
CLASSES = ("normal", "denormal", "special")
FULL = ("float32", "float64")
WITHOUT_HALF = frozenset({"Rint"})  # of which TensorFlow has none of half types
MARKERS = ("<!-- fusion ulps: begin -->", "<!-- fusion ulps: end -->")
SPECIAL = (0.0, 1.0, 0.5, 2.0, 6.0, 7.0, 10.0, 88.0, 89.0, 104.0, 710.0, 1e-3, 0.625, 1e4, np.inf)


def main(arguments: list[str] | None = None) -> int:
    """Measure and write, or print the tables of what was written. Returns 1 if an op was in no region."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fusion.ulps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, help="where to write the results, as JSON")
    parser.add_argument("--only", nargs="+", choices=DTYPES, default=list(DTYPES), help="dtypes (all)")
    parser.add_argument("--table", type=Path, help="results to make tables of, and measure nothing")
    parser.add_argument("--document", type=Path, help="a page to put the tables in, between two markers")
    options = parser.parse_args(arguments)
    results = load(options.table) or {"format": FORMAT, "machine": machine(), "count": COUNT, "cases": {}}
    if not options.table:
        for dtype in options.only:
            results["cases"][dtype] = measured(dtype)
        if options.output:
            save(results, options.output)
    print(tables(results))
    if options.document:
        write(options.document, tables(results), MARKERS)
    return 0 if all(case for case in results["cases"].values()) else 1


# ---- numbers ----


def numbers(dtype: str, of: str, seed: int) -> Array:
    """`count` numbers of a class; numbers of another seed are their partners in ops of two arguments."""
    import tensorflow as tf

    kind, random = tf.as_dtype(dtype).as_numpy_dtype, np.random.default_rng(seed)
    bits, (mantissa, exponents) = _unsigned(dtype), _layout(dtype)
    signs = random.integers(0, 2, COUNT).astype(bits) << bits(8 * np.dtype(bits).itemsize - 1)
    if of == "denormal":
        return (random.integers(1, 1 << mantissa, COUNT).astype(bits) | signs).view(kind)
    if of == "special":
        info = tf.as_dtype(dtype)
        tiny = np.array(1 << mantissa, bits).view(kind)
        chosen = np.array([*SPECIAL, np.nan, info.max, float(info.max) / 2, float(tiny), float(tiny) * 2], np.float64)
        with np.errstate(over="ignore"):
            values = np.concatenate([chosen, -chosen]).astype(kind)
        return values[random.integers(0, len(values), COUNT)]
    sizes = random.integers(1, exponents, COUNT).astype(bits) << bits(mantissa)
    any_size = (sizes | signs | random.integers(0, 1 << mantissa, COUNT).astype(bits)).view(kind)
    near = (random.normal(size=COUNT) * np.where(random.random(COUNT) < 0.5, 1, 4)).astype(kind)
    return np.where(np.arange(COUNT) % 2 == 0, near, any_size)


def _unsigned(dtype: str) -> Any:
    return {"float64": np.uint64, "float32": np.uint32}.get(dtype, np.uint16)


def _layout(dtype: str) -> tuple[int, int]:
    """Bits of the mantissa, and the exponent of infinity."""
    return {"float64": (52, 2047), "float32": (23, 255), "float16": (10, 31), "bfloat16": (7, 255)}[dtype]


# ---- measuring ----


def measured(dtype: str, count: int = COUNT) -> dict[str, dict[str, Any]]:
    """The measurements of each op of a dtype, by class of numbers; without ops that no region computes."""
    import tensorflow as tf

    import tfmem

    def plain(*given: Any) -> dict[str, Any]:
        return {
            name: getattr(tf.raw_ops, name)(**dict(zip(op.inputs, given, strict=False)), name=name)
            for name, op in OPS.items()
            if dtype in FULL or name not in WITHOUT_HALF
        }

    fused = tfmem.optimize(
        tf.function(plain, autograph=False),
        passes=("fusion",),
        fusion=tfmem.FusionOptions(tune="off"),
        cache_directory="",
    )
    found: dict[str, dict[str, Any]] = {}
    for of in CLASSES:
        given = [numbers(dtype, of, seed)[:count] for seed in (1, 2)]
        tensors = [tf.constant(each) for each in given]
        ours = {name: value.numpy() for name, value in fused(*tensors).items()}
        theirs = {name: value.numpy() for name, value in tf.function(plain, autograph=False)(*tensors).items()}
        regions = {op for region in tfmem.report(fused).regions for step in region.steps for _, op in step.ops}
        for name, op in OPS.items():
            if name not in ours:
                continue
            if name not in regions and not (name == "Round" and "Rint" in regions):
                print(f"{name} of {dtype} is in no region", file=sys.stderr)
                continue
            exact = None
            wide = np.longdouble if dtype == "float64" else np.float64
            if op.exact is not None and not (dtype == "float64" and name in {"Erf", "Erfc"}):
                with np.errstate(all="ignore"):
                    exact = op.exact(*(each.astype(wide) for each in given[: len(op.inputs)]))
            found.setdefault(name, {})[of] = compared(dtype, ours[name], theirs[name], exact)
    return found


def compared(dtype: str, ours: Array, theirs: Array, exact: Array | None) -> dict[str, Any]:
    """How two results differ, and how far each is from the exact ones.

    Returns:
        `differ`: how many are not equal (two NaN are); `ulps`: the most units in the last place between two that are
        finite; `signs`: how many zeros differ in their signs alone; `nonfinite`: how many of those that differ are
        not finite on one side; `ours` and `theirs`: the most units in the last place from the exact value, where
        that is a normal number of the dtype, and so are the results.
    """
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    signs = (ours == theirs) & (np.signbit(ours) != np.signbit(theirs))
    finite = np.isfinite(ours) & np.isfinite(theirs)
    apart = np.abs(_ordered(dtype, ours) - _ordered(dtype, theirs))[finite]
    found = {
        "differ": int(np.sum(~same)),
        "ulps": int(apart.max(initial=0)),
        "signs": int(np.sum(signs)),
        "nonfinite": int(np.sum(~finite & ~same)),
    }
    if exact is not None:
        found |= {"ours": _error(dtype, ours, exact), "theirs": _error(dtype, theirs, exact)}
    return found


def _ordered(dtype: str, values: Array) -> Array:
    """Numbers of which neighbours differ by 1; both zeros are 0."""
    bits = _unsigned(dtype)
    magnitude = (values.view(bits) & bits(~(1 << (8 * values.dtype.itemsize - 1)) & np.iinfo(bits).max)).astype(
        np.int64
    )
    return np.where(np.signbit(values), -magnitude, magnitude)


def _error(dtype: str, values: Array, exact: Array) -> float:
    mantissa, exponents = _layout(dtype)
    smallest, bias = np.ldexp(exact.dtype.type(1), 2 - exponents // 2 - 1), mantissa
    largest = np.ldexp(exact.dtype.type(2) - np.ldexp(exact.dtype.type(1), -mantissa), exponents // 2)
    wide = values.astype(exact.dtype)
    with np.errstate(all="ignore"):
        normal = np.isfinite(wide) & (np.abs(exact) >= smallest) & (np.abs(exact) <= largest)
        if not normal.any():
            return 0.0
        _, exponent = np.frexp(np.abs(exact[normal]))
        unit = np.ldexp(exact.dtype.type(1), exponent - 1 - bias)
        return float(round(float(np.max(np.abs(wide[normal] - exact[normal]) / unit)), 2))


# ---- tables ----


def tables(results: Mapping[str, Any]) -> str:
    """The tables of normal numbers, and of the other classes where something differs."""
    cases = results["cases"]
    lines = []
    rows = [
        [name, *(_cell(cases[dtype].get(name, {}).get("normal")) for dtype in cases)]
        for name in OPS
        if any(name in cases[dtype] for dtype in cases)
    ]
    exact = [name for name, *cells in rows if all(cell in ("=", "-") for cell in cells)]
    lines += [f"To the bit in all dtypes, of normal numbers: {', '.join(exact)}.", ""]
    lines += _markdown(["op", *cases], [row for row in rows if row[0] not in exact])
    for of, title in (("denormal", "Denormal numbers"), ("special", "Special values")):
        found = [[name, *(_other(cases[dtype].get(name, {}).get(of)) for dtype in cases)] for name in OPS]
        kept = [row for row in found if any(cell not in ("=", "-") for cell in row[1:])]
        lines += ["", f"{title}, where something differs:", ""]
        lines += _markdown(["op", *cases], kept) if kept else ["Nothing does."]
    return "\n".join(lines)


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]


def _cell(case: Mapping[str, Any] | None) -> str:
    if case is None:
        return "-"
    if not (case["differ"] or case["signs"] or case["nonfinite"]):
        return "="
    exact = f" ({_short(case['ours'])}; {_short(case['theirs'])})" if "ours" in case else ""
    return f"{_share(case['differ'])}, {_short(case['ulps'])}{exact}"


def _other(case: Mapping[str, Any] | None) -> str:
    if case is None:
        return "-"
    parts = []
    if case["differ"]:
        parts.append(f"{_share(case['differ'])}, {_short(case['ulps'])}")
    if case["signs"]:
        parts.append(f"{_share(case['signs'])} signs of zero")
    if case["nonfinite"]:
        parts.append(f"{_share(case['nonfinite'])} not finite")
    return "; ".join(parts) or "="


def _share(count: int) -> str:
    return f"{count / COUNT:.1%}" if count >= COUNT / 1000 else "<0.1%"


def _short(units: float) -> str:
    return f"{units:g}" if units < 10_000 else f"{units:.0e}".replace("e+0", "e").replace("e+", "e")


if __name__ == "__main__":
    sys.exit(main())
