"""Times what a new user does first, in a temporary folder:

python tools/time_first_use.py wheel [WHEEL]   # pip install of a wheel, then a first optimised fit
python tools/time_first_use.py clone [URL]     # git clone, then `make demo` to its picture
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIT = """
import keras, numpy as np, tfmem
layers = [keras.layers.Conv2D(16, 3, padding="same", activation="relu") for _ in range(4)]
layers += [keras.layers.Flatten(), keras.layers.Dense(10)]
model = keras.Sequential([keras.Input((32, 32, 3)), *layers], name="net")
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model = tfmem.optimize(model, memory_budget="24MiB")
model.fit(np.ones([512, 32, 32, 3], np.float32), np.zeros(512, np.int32), batch_size=64, epochs=2, verbose=0)
print(tfmem.explain(model))
"""


def ran(what: str, command: Sequence[str], folder: Path) -> tuple[float, str]:
    """Run a command in a folder: how long it took, and what it printed, which is shown if it failed."""
    began = time.monotonic()
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    seconds = time.monotonic() - began
    if done.returncode:
        sys.exit(f"{what} failed after {seconds:.0f} s, exit status {done.returncode}:\n{done.stdout[-4000:]}")
    print(f"{seconds:6.0f} s  {what}", flush=True)
    return seconds, done.stdout


def wheel(given: str, folder: Path) -> float:
    """A new environment, pip, and a first fit."""
    found = (
        Path(given).resolve() if given else max((ROOT / "dist").glob("*.whl"), key=lambda file: file.stat().st_mtime)
    )
    python = folder / "venv/bin/python"
    ran("a new environment, not counted", [sys.executable, "-m", "venv", str(folder / "venv")], folder)
    install = [str(python), "-m", "pip", "install", "--quiet", str(found)]
    installed, _ = ran(f"pip install {found.name}", install, folder)
    fitted, printed = ran("a first optimised fit", [str(python), "-c", FIT], folder)
    print(printed.splitlines()[-1])
    return installed + fitted


def clone(given: str, folder: Path) -> float:
    """A clone, and its demo."""
    source = given or f"file://{ROOT}"
    cloned, _ = ran("git clone", ["git", "clone", "--quiet", "--depth", "1", source, "tfmem"], folder)
    shown, printed = ran("make demo", ["make", "demo"], folder / "tfmem")
    picture = re.search(r"\S+train_cnn\.png", printed)
    if picture is None or not Path(picture[0]).is_file():
        sys.exit(f"make demo drew no picture:\n{printed[-4000:]}")
    print(f"its picture is {picture[0]}")
    return cloned + shown


def main() -> None:
    """Time one path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", choices=("wheel", "clone"))
    parser.add_argument("given", nargs="?", default="", help="a wheel, or what to clone; default: dist/*.whl, this one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        total = {"wheel": wheel, "clone": clone}[options.path](options.given, Path(folder))
    print(f"{total:6.0f} s  together")


if __name__ == "__main__":
    main()
