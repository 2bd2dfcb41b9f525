"""A content-addressed cache of files: a key says all that an artifact depends on, and never means anything else."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from custom_ops.errors import warn

Value = TypeVar("Value")

# What reading JSON of any content as something else may raise: a number too large for a float, a list for a mapping.
MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)
LARGEST = 256 << 20  # bytes of a file; kernels have some 100 KiB
CHECKSUM = 64  # characters of a digest, which a file begins with


class UnusableError(Exception):
    """A file of a cache holds something else than what was written there; its content is computed again."""


def digest(*parts: str | bytes) -> str:
    """A name for the content `parts`; each part's length counts, so that parts cannot run into each other."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()


def read_file(place: Path, most: int = LARGEST) -> bytes:
    """The bytes of an ordinary file.

    Raises:
        OSError: it cannot be read, is larger than `most`, or is a pipe or device, which could keep a reader waiting.
    """
    with open(place, "rb", opener=_open_at_once) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            raise OSError(f"'{place}' is no ordinary file of at most {most:,} bytes")
        return file.read(most)


def write_file(place: Path, data: bytes) -> None:
    """Write aside, then rename, so that a reader sees all of it or none.

    Raises:
        OSError: that cannot be done; nothing is left behind.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=place.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(aside).replace(place)
    except OSError:
        Path(aside).unlink(missing_ok=True)
        raise


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


class Cache:
    """Files by key in one folder, safe among threads and processes.

    The loser of a race wrote the same bytes. A file begins with a digest of its key and content: what a full disk, a
    broken one or another program made of it counts as not there, and is replaced.
    """

    def __init__(self, folder: Path, largest: int = LARGEST) -> None:
        """`largest`: bytes of a file that is read."""
        self.folder = folder
        self._largest = largest

    def place(self, key: str) -> Path:
        """Where the file of `key` lies."""
        return self.folder / key[:2] / key[2:]

    def get(self, key: str, make: Callable[[], bytes]) -> bytes:
        """The bytes under `key`, made and kept if they are not there. A folder that cannot be written is no error."""
        return self.read(key, make, bytes)

    def read(self, key: str, make: Callable[[], bytes], parse: Callable[[bytes], Value]) -> Value:
        """What `parse` reads in the bytes under `key`, made and kept if they are not there or `parse` raises
        `UnusableError`."""
        found = self.find(key, parse)
        if found is not None:
            return found
        data = make()
        self.keep(key, data)
        return parse(data)

    def find(self, key: str, parse: Callable[[bytes], Value]) -> Value | None:
        """What `parse` reads in the bytes under `key`; None if they are not there or `parse` raises `UnusableError`."""
        try:
            return parse(_checked(key, read_file(self.place(key), self._largest)))
        except (OSError, UnusableError):
            return None

    def keep(self, key: str, data: bytes) -> None:
        """Write `data` under `key`. A folder that cannot be written is no error.

        An empty directory in the place of the file goes. What else is in the way would stay there for good, and every
        process would make the content once more, so the user is told.
        """
        place = self.place(key)
        try:
            if place.is_dir() and not place.is_symlink():
                with suppress(OSError):
                    place.rmdir()
            write_file(place, digest(key, data).encode() + data)
        except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
            warn(f"tfmem: '{place}' cannot be written to the cache ({error.strerror}): remove what is in its place")
        except OSError:
            pass


def _checked(key: str, stored: bytes) -> bytes:
    checksum, data = stored[:CHECKSUM], stored[CHECKSUM:]
    if checksum != digest(key, data).encode():
        raise UnusableError(key)
    return data
