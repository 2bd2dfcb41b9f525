"""The files that benchmarks write: outcomes by case, and the machine they are of."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FORMAT = 1
# environment variables that change how fast or how exactly TensorFlow computes
FLAGS = (
    "NVIDIA_TF32",
    "TF_CUDNN_",
    "TF_DETERMINISTIC",
    "TF_ENABLE_",
    "TF_FORCE_",
    "TF_GPU_",
    "TF_NUM_",
    "TF_USE_",
    "TF_XLA_FLAGS",
)


def begun(options: argparse.Namespace, **about: Any) -> dict[str, Any]:
    """Results that a benchmark of `runs.command_line` goes on from, now of this machine and what else it depends on."""
    results = load(options.output) or load(options.resume) or {"format": FORMAT, "cases": {}}
    results["machine"] = machine() | about
    return results


def commit() -> str:
    """The commit that is measured, "-dirty" behind it where files differ; or $BENCHMARKS_COMMIT, of a copy's origin."""
    if told := os.environ.get("BENCHMARKS_COMMIT"):
        return told
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=7"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> dict[str, Any]:
    """What the numbers depend on, found without starting TensorFlow."""
    query = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"
    try:
        gpus = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        gpus = []
    model = [text for text in _lines("/proc/cpuinfo") if text.startswith("model name")]
    return {
        "commit": commit(),
        "gpus": gpus,
        "gpu_fields": query,
        "cpu": model[0].partition(":")[2].strip() if model else platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(FLAGS)},
    }


def load(path: Path | None) -> dict[str, Any] | None:
    """Results written before, None where there are none.

    Raises:
        ValueError: the file is not this benchmark's.
    """
    if path is None or not path.exists():
        return None
    results = json.loads(path.read_text())
    if results.get("format") != FORMAT or "cases" not in results:
        raise ValueError(f"{path} holds no results of this benchmark (format {FORMAT})")
    return results


def save(results: dict[str, Any], path: Path) -> None:
    """Write aside, then rename: a run that is cut off leaves the results before it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(results, indent=1) + "\n")
    aside.replace(path)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
