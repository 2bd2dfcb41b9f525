"""The replay of a step's allocations, in the extension module; where it is missing, what to do."""

from __future__ import annotations

from collections.abc import Container

from custom_ops.errors import OpLibraryError
from custom_ops.load import build_hint

Failed = tuple[int, int, int, int, bool]  # the fields of a failure


def replay_step(
    tables: tuple[bytes, bytes, bytes, bytes, bytes], spare: float, smallest: int, excused: Container[int], until: int
) -> tuple[Failed | None, list[int], list[int]]:
    """The failure, the fields of what is in memory, and the positions of the ops that miss their workspace.

    Args:
        tables: buffers, workspace, moves, paddings and free chunks, as bytes of 64-bit integers.
        spare: workspace is asked for with so many times its bytes.
        smallest: bytes of the smallest buffer that is replayed.
        excused: positions of the ops that may go without their workspace.
        until: the position before which the replay ends.

    Raises:
        OpLibraryError: the extension module is missing.
    """
    try:
        from custom_ops import _extension  # reading plans needs no extension
    except ImportError as error:
        raise OpLibraryError(f"Replaying allocations needs the extension module: {error}. {build_hint()}") from error
    return _extension.replay_step(*tables, spare, smallest, excused, until)
