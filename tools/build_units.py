"""The units of compilation: which C++ sources g++ compiles together, as one text.

A source spends most of its compile time on the headers that it includes. The sources of a unit read
them once. TensorFlow's own headers are read once for all units (ops/precompiled.h).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

LINES = 1600  # of a unit, about; a longer one would take long to compile after each change
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
_ONE_INSTRUCTION_SET = re.compile(r"^#define TFMEM_VECTOR_BYTES\b", re.MULTILINE)


@dataclass(frozen=True)
class Unit:
    """Sources of one folder that are compiled as one text.

    Attributes:
        name: the name of its object file, without the ending.
        sources: the sources, in the order of the text.
        sees_tensorflow: whether it reads headers of TensorFlow's.
    """

    name: str
    sources: tuple[Path, ...]
    sees_tensorflow: bool

    def text(self, root: Path) -> str:
        """The text of the unit; its includes are relative to `root`, as those of the sources are."""
        return "".join(include(source, root) for source in self.sources)


def include(file: Path, root: Path) -> str:
    """A line of C++ that includes a file, named as it is seen from `root`."""
    return f'#include "{file.relative_to(root)}"\n'


def units(sources: Sequence[Path], root: Path) -> list[Unit]:
    """The units of `sources`, in a fixed order.

    Each folder is cut into as few parts of similar length as `LINES` allows. A source that is
    compiled for one instruction set is a unit by itself, so that the set's flags reach no other.
    """
    found = []
    for folder, members in groupby(
        sorted(sources, key=lambda source: (source.parent, source)), lambda source: source.parent
    ):
        texts = {source: source.read_text() for source in members}
        single = [source for source, text in texts.items() if _ONE_INSTRUCTION_SET.search(text)]
        found += [_unit(f"{folder.name}.{source.stem}", [source], root) for source in single]
        shared = {source: len(text.splitlines()) for source, text in texts.items() if source not in single}
        parts = _parts(shared)
        names = [folder.name] if len(parts) == 1 else [f"{folder.name}_{number + 1}" for number in range(len(parts))]
        found += [_unit(name, part, root) for name, part in zip(names, parts, strict=True)]
    return found


def one_by_one(sources: Sequence[Path], root: Path) -> list[Unit]:
    """A unit for each source: for sources with cheap headers, whose own names repeat from file to file."""
    return [_unit(f"{source.parent.name}.{source.stem}", [source], root) for source in sources]


def _unit(name: str, sources: Sequence[Path], root: Path) -> Unit:
    return Unit(name, tuple(sources), _sees_tensorflow(sources, root))


def _parts(lines: dict[Path, int]) -> list[list[Path]]:
    """Consecutive sources, in as few parts of similar length as `LINES` allows."""
    total = sum(lines.values())
    count = -(-total // LINES)
    parts: list[list[Path]] = [[] for _ in range(count)]
    before = 0
    for source, length in lines.items():
        middle = before + length / 2
        parts[int(middle * count / total)].append(source)
        before += length
    return [part for part in parts if part]


def _sees_tensorflow(sources: Iterable[Path], root: Path) -> bool:
    """Whether a source includes a header of TensorFlow's, itself or through a header of ours."""
    waiting, seen = list(sources), set()
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        for name in _INCLUDE.findall(file.read_text()):
            if name.startswith(("tensorflow/", "tsl/", "xla/", "unsupported/Eigen/")):
                return True
            if (root / name).exists():
                waiting.append(root / name)
    return False
