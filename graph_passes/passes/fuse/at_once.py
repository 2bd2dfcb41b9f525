"""Work that other processes do for several regions at a time, in the order in which its results are wanted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

Made = TypeVar("Made")


class AtOnce:
    """Runs functions in threads while `with` lasts; with room for one, in the thread that asks for its result."""

    def __init__(self, most: int) -> None:
        """`most`: functions that run at a time."""
        self._pool = ThreadPoolExecutor(most) if most > 1 else None

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)  # after an error, what has not begun

    def begin(self, make: Callable[[], Made]) -> Callable[[], Made]:
        """What waits for the result of `make`, and raises what it raised."""
        return self._pool.submit(make).result if self._pool is not None else make
