"""What was found out by timing, kept on disk under all that it depends on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from custom_ops.jit.cache import MALFORMED, Cache, UnusableError, digest

Value = TypeVar("Value")


@dataclass(frozen=True)
class Remembered(Generic[Value]):
    """Values in a `Cache`. A file of any other content counts as not there, and so does an unusable folder.

    Attributes:
        kind: what the values are, with the version of their form: another version finds no older file.
        cache: None keeps nothing.
        write: the value as JSON has it.
        read: the value of what JSON has; raises ValueError, TypeError or KeyError where that is none.
    """

    kind: str
    cache: Cache | None
    write: Callable[[Value], Any]
    read: Callable[[Any], Value]

    def key(self, conditions: str | Mapping[str, Any], *timed: str | bytes) -> str:
        """A digest of what is timed, and of the device with its versions."""
        known = conditions if isinstance(conditions, str) else json.dumps(conditions, sort_keys=True, default=str)
        return digest(self.kind, known, *timed)

    def find(self, key: str) -> Value | None:
        """What is known under a key."""
        return None if self.cache is None else self.cache.find(key, self.parse)

    def keep(self, key: str, value: Value) -> None:
        """Let other processes know."""
        if self.cache is not None:
            self.cache.keep(key, self._bytes(value))

    def get(self, key: str, make: Callable[[], Value]) -> Value:
        """What is known under a key; else what `make` finds, which is kept."""
        if self.cache is None:
            return make()
        return self.cache.read(key, lambda: self._bytes(make()), self.parse)

    def parse(self, data: bytes) -> Value:
        """The value in a file.

        Raises:
            UnusableError: the file holds something else.
        """
        try:
            return self.read(json.loads(data))
        except MALFORMED as error:
            raise UnusableError(str(error)) from error

    def _bytes(self, value: Value) -> bytes:
        return json.dumps(self.write(value)).encode()
