"""Two modules have one name only where they have one role: in two systems, two layers or two passes."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Each shared name, and why several modules have it. Any other name is that of one module.
ROLES = {
    "__init__": "what a package is",
    "apply": "each pass: turns its plan into rewrites",
    "bench": "each search: times kernels for the tuner",
    "differentiate": "each system: the gradient of its code, as code",
    "errors": "each layer: the errors that it raises",
    "faults": "bugs in tfmem: over one recurrence, and over a step",
    "gpu_program": "each system: a GPU program that its op runs",
    "keras": "what users import as tfmem.keras, and what optimises a Keras model",
    "launch": "kernels launched by the rules of the driver, and by those of an op",
    "op": "each system: its op in TensorFlow, called and differentiated",
    "options": "what a user may set: of each pass, and of all of tfmem",
    "plan": "each pass: decides, and returns a frozen plan",
    "products": "products of matrices: chosen, lowered, and written as CUDA",
    "ranking": "each search: candidates by predicted time",
    "reference": "definitions in NumPy, which all readers are compared with",
    "source": "each system: the CUDA source of its kernels",
    "space": "each search: which candidates there are",
    "spec": "each system: what its op reads",
    "text": "a form as text: of programs, and of regions, which hold programs",
    "values": "each system that generates code: where a number is read",
}


def modules() -> dict[str, list[str]]:
    """The files of each name, over all packages."""
    found = defaultdict(list)
    for package in ("custom_ops", "graph_passes", "tfmem"):
        for file in sorted((ROOT / package).rglob("*.py")):
            found[file.stem].append(file.relative_to(ROOT).as_posix())
    return found


def test_modules_of_one_name_have_one_role() -> None:
    shared = {name: files for name, files in modules().items() if len(files) > 1}
    assert {name: files for name, files in shared.items() if name not in ROLES} == {}, "rename one, or state the role"
    assert sorted(set(ROLES) - set(shared)) == [], "no two modules have this name now"
