"""A result that a thread computes, once the step has run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from custom_ops.background import PAUSE, Background

T = TypeVar("T")


class Work(Generic[T]):
    """One result, or the error instead.

    Attributes:
        result: of the work; None until it is done, and if it failed.
        error: what it failed with.
    """

    def __init__(self, make: Callable[[], T], name: str, pause: float = PAUSE) -> None:
        """
        Args:
            make: does it.
            name: of the thread.
            pause: seconds before it does.
        """
        self.result: T | None = None
        self.error: Exception | None = None
        self._make = make
        self._thread = Background(self._run, name, pause)

    @property
    def done(self) -> bool:
        """Whether there is a result, or an error."""
        return self._thread.done

    def begin(self) -> None:
        """Start the thread, once; later calls do nothing."""
        self._thread.begin()

    def wait(self) -> None:
        """Wait for the end of the work, which begins if it has not yet."""
        self._thread.wait()

    def take(self) -> T | None:
        """The result, which is forgotten here: an error that a library keeps may keep this thread's frames for good."""
        result, self.result = self.result, None
        return result

    def _run(self) -> None:
        try:
            self.result = self._make()
        except Exception as error:  # after any error, the step runs without the result
            self.error = error
