"""Implementation templates: which part of a kernel computes what (FusionStitching, section 5.2).

    <template>      ::= <schedule-list>
    <schedule-list> ::= <schedule> <schedule-list> | <schedule>
    <schedule>      ::= <identifier> '[' <attr-list> ']' ';' | <identifier> '[' <attr-list> ']' 'S' ';'
    <attr-list>     ::= <attr> ',' <attr-list> | <attr>
    <attr>          ::= <attrtype> | <subattr-list>
    <subattr-list>  ::= <subattr> '-' <subattr-list> | <subattr>
    <subattr>       ::= <attrtype> '_' <integer>
    <attrtype>      ::= 'GRID' | 'WARP' | 'CTA' | 'THREAD'

A schedule has an attribute for each axis that its root looks at (none for a number: an empty list, which the paper's
grammar lacks). The softmax of rows of 1000 numbers, a warp for each row, eight rows a CTA, at most 1056 CTAs:

    reduce_1[GRID_1056-WARP_8,CTA];reduce_4[GRID_1056-WARP_8,CTA];output_0[GRID_1056-WARP_8,CTA];

`mapping.py` says what attributes mean.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias, cast

from custom_ops.errors import KernelError

Kind: TypeAlias = Literal["GRID", "WARP", "CTA", "THREAD"]

_SCHEDULE = re.compile(r"(\w+)\[([^\]]*)\](S?);")
_LEVEL = re.compile(r"(GRID|WARP|CTA|THREAD)(?:_(\d+))?")


class Level(NamedTuple):
    """One level of parallelism along an axis; `size` positions at once, 0: as many as there are."""

    kind: Kind
    size: int = 0

    def __str__(self) -> str:
        return f"{self.kind}_{self.size}" if self.size else self.kind


Attribute: TypeAlias = tuple[Level, ...]


@dataclass(frozen=True)
class RootSchedule:
    """How one root is computed.

    Attributes:
        root: its name.
        attributes: one for each of its axes.
        shared: whether the result goes to shared memory; of an output, whether it goes through it.
    """

    root: str
    attributes: tuple[Attribute, ...]
    shared: bool = False

    def __str__(self) -> str:
        attributes = ",".join("-".join(map(str, levels)) for levels in self.attributes)
        return f"{self.root}[{attributes}]{'S' * self.shared};"


@dataclass(frozen=True)
class Template:
    """A schedule for each root, in the roots' order."""

    schedules: tuple[RootSchedule, ...]

    def __str__(self) -> str:
        return "".join(map(str, self.schedules))


def parse(text: str) -> Template:
    """Reads what `str` wrote.

    Raises:
        KernelError: the text is no template; the message holds what cannot be read.
    """
    compact = re.sub(r"\s", "", text)
    schedules, end = [], 0
    for found in _SCHEDULE.finditer(compact):
        if found.start() != end:
            break
        schedules.append(_schedule(*found.groups()))
        end = found.end()
    if end != len(compact) or not schedules:
        raise KernelError(
            f"cannot read '{compact[end : end + 60]}' of a template; expected 'name[GRID,CTA];' or '...]S;'"
        )
    return Template(tuple(schedules))


@lru_cache(maxsize=1 << 14)
def _schedule(root: str, attributes: str, shared: str) -> RootSchedule:
    given = tuple(map(_attribute, attributes.split(","))) if attributes else ()
    return RootSchedule(root, given, shared == "S")


@lru_cache(maxsize=1 << 10)
def _attribute(text: str) -> Attribute:
    levels = []
    words = text.split("-")
    for word in words:
        found = _LEVEL.fullmatch(word)
        if not found or (len(words) > 1 and not found[2]):
            raise KernelError(f"cannot read the attribute '{text}' of a template; expected GRID, or GRID_8-WARP_4")
        levels.append(Level(cast(Kind, found[1]), int(found[2] or 0)))
    return tuple(levels)
