"""Files that tests compile, kept under their content in build/tests: worker processes and runs share them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from custom_ops import build_flags
from custom_ops.jit import nvrtc

FOLDER = build_flags.PACKAGE.parent / "build" / "tests"
LIMIT = 1 << 30  # bytes in FOLDER after a run

Key = Iterable[str | bytes | Path]


def kept(name: str, key: Key, make: Callable[[Path], None], folder: Path = FOLDER) -> Path:
    """A file named `name` that `make` writes once for each key; a second process waits until the first has made it.

    Args:
        name: of the file; it lies alone in a folder, so that a loader finds it there.
        key: all that decides on the contents. A path stands for what its file holds.
        make: writes the file to the path that it is given.
        folder: that holds all such files.
    """
    place = folder / _digest(name, key) / name
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.with_name("lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.exists():
                scratch = place.with_name(f"unfinished-{name}")
                make(scratch)
                scratch.replace(place)
    os.utime(place.parent)  # `prune` goes by this
    return place


def cubin(source: str, arch: int, features: str = "", contract: bool = True) -> bytes:
    """As `nvrtc.compile_source`; what NVRTC makes is kept."""

    def make(target: Path) -> None:
        target.write_bytes(nvrtc.compile_source(source, arch, features, contract))

    options = nvrtc.compile_options(arch, features, contract)
    return kept("kernel.cubin", [nvrtc.compiler_version(), *options, *nvrtc.header_texts(), source], make).read_bytes()


def prune(limit: int = LIMIT, folder: Path = FOLDER) -> None:
    """Removes files until they are no more than `limit` bytes; the least recently used go first."""
    entries = sorted(folder.glob("*/"), key=lambda entry: entry.stat().st_mtime, reverse=True)
    total = 0
    for entry in entries:
        total += sum(file.stat().st_size for file in entry.iterdir())
        if total > limit:
            shutil.rmtree(entry)


def compiler_key() -> list[str]:
    """The C++ compiler, as far as it decides on what comes out."""
    found = shutil.which(build_flags.compiler())
    if found is None:
        raise FileNotFoundError(f"no C++ compiler {build_flags.compiler()!r}; install g++ or set CXX")
    real = Path(found).resolve()
    return [str(real), str(real.stat().st_size), str(real.stat().st_mtime_ns)]


def _digest(name: str, key: Key) -> str:
    found = hashlib.sha256(name.encode())
    for part in key:
        data = part.read_bytes() if isinstance(part, Path) else part.encode() if isinstance(part, str) else part
        found.update(b"%d " % len(data))
        found.update(data)
    return found.hexdigest()[:32]
