"""Whether the host can take what a plan moves: checked before anything runs."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from custom_ops.load import Library
from graph_passes.errors import HostMemoryError, SpillDirectoryError
from graph_passes.passes.offload.options import OffloadOptions


def require_room(moved: int, options: OffloadOptions, is_gpu: bool, library: Library) -> None:
    """Check the spill directory (no GPU) or the host's memory (GPU) for `moved` bytes.

    Raises:
        SpillDirectoryError: the directory is missing, read-only, or has too little space.
        HostMemoryError: the spill budget, the host budget or the host's free memory is too small.
    """
    if is_gpu:
        _require_host_memory(moved, options, library)
    else:
        _require_spill_space(moved, options)


def _require_host_memory(moved: int, options: OffloadOptions, library: Library) -> None:
    if options.host_budget and moved > options.host_budget:
        raise HostMemoryError(
            f"the plan moves {moved:,} bytes to the host, but host_budget is {options.host_budget:,}; "
            "raise host_budget, or memory_budget so that less has to move"
        )
    free = library.host_memory().available
    if moved > free:
        raise HostMemoryError(
            f"the plan moves {moved:,} bytes to the host, which has {free:,} free for this process; "
            "raise memory_budget so that less has to move, or use a smaller batch"
        )


def _require_spill_space(moved: int, options: OffloadOptions) -> None:
    directory = Path(options.spill_directory or tempfile.gettempdir())
    if not directory.is_dir():
        raise SpillDirectoryError(f"spill_directory '{directory}' is not a directory; create it, or name another")
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise SpillDirectoryError(
            f"spill_directory '{directory}' cannot be written to ({error.strerror}); name another"
        ) from error
    if options.spill_budget and moved > options.spill_budget:
        raise HostMemoryError(
            f"the plan spills {moved:,} bytes, but spill_budget is {options.spill_budget:,}; "
            "raise spill_budget, or memory_budget so that less has to move"
        )
    free = shutil.disk_usage(directory).free
    if moved > free:
        raise SpillDirectoryError(
            f"the plan spills {moved:,} bytes, but spill_directory '{directory}' has {free:,} free; "
            "name one with more space, or raise memory_budget so that less has to move"
        )
