"""The links of several GPUs of one step are measured together, once, and only if tensors move."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from custom_ops.errors import OpLibraryError, TfmemWarning
from custom_ops.load import Library, LinkBandwidth, SpillBandwidth, load
from graph_passes.analysis.cost import device_costs as profiles
from tfmem.devices import Target, links_together

ALONE, BUSY = 50e9, 25e9


class FakeLibrary:
    """Links that are half as fast while others are busy, and a count of measurements."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.measured: list[Any] = []

    def link_bandwidth(self, ordinal: int) -> LinkBandwidth:
        self.measured.append(ordinal)
        return LinkBandwidth(ALONE, ALONE, ALONE, ALONE)

    def links_bandwidth(self, ordinals: list[int]) -> list[tuple[float, float]]:
        self.measured.append(list(ordinals))
        if self.fails:
            raise OpLibraryError("no memory")
        return [(BUSY + ordinal, BUSY - ordinal) for ordinal in ordinals]

    def spill_bandwidth(self, _: str) -> SpillBandwidth:
        self.measured.append("spill")
        return SpillBandwidth(1e9, 2e9)


def target(name: str, ordinal: int = 0) -> Target:
    return Target(f"/device:{name}", name, 1 << 40, profiles.load("unit"), ordinal)


FIRST, SECOND, HOST = target("GPU:0", 2), target("GPU:1", 5), target("CPU:0")


def linked(library: FakeLibrary, *targets: Target) -> list[Any]:
    return list(links_together(targets, library))  # type: ignore[arg-type]


def test_links_of_several_gpus_are_measured_while_all_are_busy() -> None:
    library = FakeLibrary()
    host, first, second = linked(library, HOST, FIRST, SECOND)
    assert library.measured == []
    assert (second.offload, second.prefetch) == (BUSY + 5, BUSY - 5)
    assert (first.offload, first.prefetch) == (BUSY + 2, BUSY - 2)
    assert library.measured == [[2, 5]]
    assert (host.offload, host.prefetch) == (1e9, 2e9)
    assert library.measured == [[2, 5], "spill"]
    assert linked(library, FIRST, SECOND)[0].offload == BUSY + 2
    assert library.measured == [[2, 5], "spill"]


def test_the_link_of_one_gpu_is_measured_alone() -> None:
    library = FakeLibrary()
    first, host = linked(library, FIRST, HOST)
    assert first.offload == ALONE
    assert host.offload == 1e9
    assert library.measured == [2, "spill"]


def test_a_link_that_cannot_be_measured_is_that_of_the_profile() -> None:
    first, second = linked(FakeLibrary(fails=True), FIRST, SECOND)
    with pytest.warns(TfmemWarning, match="could not be measured, so plans assume"):
        assert first.offload == FIRST.profile.offload
    assert second.prefetch == SECOND.profile.prefetch


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="there are GPUs")
def test_without_gpus_the_library_says_so() -> None:
    library: Library = load()
    with pytest.raises(OpLibraryError, match="bandwidth test failed"):
        library.links_bandwidth([0, 1], 1 << 20)
