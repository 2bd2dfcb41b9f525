"""TfmemFusion on a GPU, without one: its kernels run on the CPU, its driver is a fake."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.tf import fake_gpu

ON_FAKE_GPU = (
    "library_products",
    "ops",
    "orders",
    "programs",
    "products",
    "steps",
)
LONG = ("budgets", "convolutions", "padded_convolutions", "pooling", "product_steps", "random", "sparse", "tuning")


def test_launches_in_flight_have_addresses_of_their_own(on_fake_driver: Callable[[str], None]) -> None:
    on_fake_driver("graph_launches")


def test_steps_run_in_any_order_that_they_allow(on_fake_driver: Callable[[str], None]) -> None:
    on_fake_driver("step_schedule")


def test_ctas_that_wait_for_each_other_run_at_once(on_fake_driver: Callable[[str], None]) -> None:
    on_fake_driver("kernel_launch")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", [*ON_FAKE_GPU, *(pytest.param(file, marks=pytest.mark.long) for file in LONG)])
def test_regions_on_a_fake_gpu(file: str) -> None:
    fake_gpu.run_file(file)
