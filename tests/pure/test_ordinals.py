"""Logical devices of TensorFlow and GPUs of the driver."""

import pytest

from tfmem.gpu_ordinals import driver_ordinal


def gpus(*numbers):
    return [f"/physical_device:GPU:{number}" for number in numbers]


@pytest.mark.parametrize(
    ("physical", "visible", "logical", "ordinals"),
    [
        ([0], [0], {}, [0]),
        ([0, 1, 2], [0, 1, 2], {}, [0, 1, 2]),
        ([0, 1], [1], {}, [1]),  # set_visible_devices(gpus[1])
        ([0, 1, 2], [2, 0], {}, [0, 2]),  # the order they were named in does not count
        ([0], [0], {0: [None, None, None]}, [0, 0, 0]),  # several on one
        ([0, 1], [0, 1], {0: [None, None]}, [0, 0, 1]),
        ([0, 1], [0, 1], {1: [None, None]}, [0, 1, 1]),
        ([0, 1, 2], [1, 2], {0: [None] * 5, 1: [None, None]}, [1, 1, 2]),  # what is hidden has no logical devices
        ([0, 1], [0, 1], {0: [1, 0], 1: [0, 1]}, [0, 1, 0, 1]),  # by their own order, then by place
        ([0, 1], [0, 1], {0: [2], 1: [1, 3]}, [1, 0, 1]),
        ([0, 1], [], {}, []),
        ([0, 1], [0, 1], {0: []}, [0, 1]),
        ([2, 5], [2, 5], {}, [2, 5]),  # names count, should there be a hole
        (list(range(12)), [2, 10, 11], {10: [None, None]}, [2, 10, 10, 11]),
    ],
)
def test_the_gpu_of_each_logical_device(physical, visible, logical, ordinals):
    split = {gpus(number)[0]: orders for number, orders in logical.items()}
    found = [driver_ordinal(gpus(*physical), gpus(*visible), split, index) for index in range(len(ordinals) + 1)]
    assert found == [*ordinals, None]


def test_there_is_no_device_before_the_first():
    assert driver_ordinal(gpus(0), gpus(0), {}, -1) is None
