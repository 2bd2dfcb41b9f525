"""Which GPU of the driver a device of TensorFlow is: what is measured without TensorFlow has to be the same one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def driver_ordinal(
    physical: Sequence[str],
    visible: Collection[str],
    logical: Mapping[str, Sequence[int | None]],
    index: int,
) -> int | None:
    """The driver's number of the GPU that the logical device "GPU:<index>" lies on; None if there is no such device.

    TensorFlow numbers physical devices as the driver does: both count what CUDA_VISIBLE_DEVICES leaves, in its order.
    Logical devices are numbered along the visible physical ones, in the physical order, whatever order they were named
    in; all that lie on one come one after another, unless the user gave them another order.

    Args:
        physical: names of all physical GPUs, "/physical_device:GPU:1".
        visible: names of those that TensorFlow may use.
        logical: of a physical GPU that was split, the order of each of its logical devices
            (`experimental_device_ordinal`), None for no order; others are one logical device.
        index: of the logical device.
    """
    places = [
        (order or 0, place, within)
        for place, name in enumerate(physical)
        if name in visible
        for within, order in enumerate(logical.get(name) or [None])
    ]
    if not 0 <= index < len(places):
        return None
    return int(physical[sorted(places)[index][1]].rpartition(":")[2])
