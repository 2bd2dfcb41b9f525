"""A content-addressed cache of files: a key says all that an artifact depends on, and never means anything else."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def digest(*parts: str | bytes) -> str:
    """A name for the content `parts`; each part's length counts, so that parts cannot run into each other."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()


class Cache:
    """Files by key in one folder, safe among threads and processes.

    A file is written aside and renamed, so a reader sees all of it or none. Whoever loses a race wrote the same bytes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str, make: Callable[[], bytes]) -> bytes:
        """The bytes under `key`, made and kept if they are not there. A folder that cannot be written is no error."""
        place = self.folder / key[:2] / key[2:]
        try:
            return place.read_bytes()
        except OSError:
            pass
        data = make()
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            handle, aside = tempfile.mkstemp(dir=place.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                Path(aside).replace(place)
            except OSError:
                Path(aside).unlink(missing_ok=True)
        except OSError:
            pass
        return data
