"""Follows a value through the code of one call: which functions handle it, in which files, how often it comes back.

    .venv/bin/python tools/value_way.py                       memory_budget, from `tfmem.optimize` to the plan
    .venv/bin/python tools/value_way.py --until plan_stitching ...

A function handles the value if an argument, a local or its result is the value, or if its code names the attribute of
an object in its hands that holds it. The way goes from a caller that handles the value to what it calls, and back to
the caller for its next such call, or with the result; the second time that one calls the other counts no more.
Neighbours of one file are one stay; a stay in a file that was left before is a return.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tfmem", "graph_passes", "custom_ops")
DEPTH = 4  # attributes of attributes

Place = tuple[str, str]  # file and function


class Reached(BaseException):
    """The value is where it was to go."""


@dataclass
class Way:
    """The way of one value.

    Attributes:
        value: what is followed.
        until: the function at which the way ends.
        steps: functions that handle it, (file, name), in order.
    """

    value: object
    until: str
    steps: list[Place] = field(default_factory=list)
    _known: set[tuple[Place, Place, str]] = field(default_factory=set)

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        """What `sys.setprofile` calls."""
        here, above = _place(frame), _place(frame.f_back)
        if here is None or event not in ("call", "return"):
            return
        if event == "return" and self._is(result) and above is not None:
            self._goes(here, above, event)
        elif event == "call" and self._held(frame):
            if above is not None and frame.f_back is not None and self._held(frame.f_back):
                self._goes(above, here, event)
            elif here not in self.steps:
                self.steps.append(here)
            if frame.f_code.co_name == self.until:
                raise Reached

    def _goes(self, source: Place, target: Place, event: str) -> None:
        """Record that the value goes from one function to another, unless it went there before."""
        if (source, target, event) not in self._known:
            self._known.add((source, target, event))
            self.steps += [source, target] if self.steps[-1:] != [source] else [target]

    def stays(self) -> list[str]:
        """The files in the order in which the value comes to them."""
        files = [file for file, _ in self.steps]
        return [file for place, file in enumerate(files) if not place or files[place - 1] != file]

    def _is(self, found: object) -> bool:
        return type(found) is type(self.value) and found == self.value

    def _held(self, frame: FrameType) -> bool:
        names = set(frame.f_code.co_names)
        held = list(frame.f_locals.values())
        return any(map(self._is, held)) or any(self._within(each, names, DEPTH) for each in held)

    def _within(self, holder: object, names: set[str], depth: int) -> bool:
        return depth > 0 and any(
            self._is(found) or self._within(found, names, depth - 1) for found in _attributes(holder, names)
        )


def _attributes(holder: object, names: set[str]) -> Iterator[object]:
    """What an object of the project holds under one of `names`."""
    if not type(holder).__module__.startswith(FOLDERS):
        return
    own = getattr(holder, "__dict__", {})
    yield from (own[name] for name in names & own.keys())


def _place(frame: FrameType | None) -> Place | None:
    """The file of a function of the project, from its root, and its name."""
    if frame is None:
        return None
    code = frame.f_code
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] not in FOLDERS:
        return None
    return str(path.relative_to(ROOT)), getattr(code, "co_qualname", code.co_name)


def follow(value: object, call: Callable[[], object], until: str) -> Way:
    """The way of `value` through `call`, up to the first call of a function named `until` that is handed it."""
    way = Way(value, until)
    sys.setprofile(way)
    try:
        call()
    except Reached:
        pass
    finally:
        sys.setprofile(None)
    return way


def _training(budget: int) -> Callable[[], object]:
    """A net of two layers that is optimised for `budget` bytes, and called."""
    import tensorflow as tf

    import tfmem

    weights = [tf.Variable(tf.ones([256, 256]) / 256) for _ in range(6)]

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            for weight in weights:
                x = tf.tanh(x @ weight)
            loss = tf.reduce_mean(x**2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(gradient)
        return loss

    x = tf.ones([2048, 256])
    return lambda: tfmem.optimize(step, memory_budget=budget, cache_directory="")(x)


def main() -> None:
    """Print the way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=9_876_543, help="bytes: no other number of the program")
    parser.add_argument("--until", default="plan_offload", help="the function at which the way ends")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    way = follow(options.budget, _training(options.budget), options.until)
    left = ""
    for file, name in way.steps:
        print(f"{file if file != left else '':44}  {name}")
        left = file
    stays = way.stays()
    files = len(set(stays))
    print(f"{len(set(way.steps))} functions, {len(stays)} stays, {files} files, {len(stays) - files} returns")


if __name__ == "__main__":
    main()
