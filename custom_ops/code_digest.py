"""A digest of tfmem's Python code and profiles of devices, for what is kept on disk and depends on them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from custom_ops.jit.cache import digest

PACKAGES = ("custom_ops", "graph_passes", "tfmem")


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Hexadecimal; another version of tfmem, or an edited file, has another one."""
    return digest_of(_files())


def digest_of(files: Iterable[tuple[str, bytes]]) -> str:
    """The digest of files, each with its name."""
    return digest(*(part for name, content in sorted(files) for part in (name, content)))


def _files() -> Iterable[tuple[str, bytes]]:
    root = Path(__file__).parent.parent
    for package in PACKAGES:
        for pattern in ("*.py", "devices/*.json"):
            for place in (root / package).rglob(pattern):
                yield place.relative_to(root).as_posix(), place.read_bytes()
