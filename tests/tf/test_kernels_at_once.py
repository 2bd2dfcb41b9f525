"""Kernels of several regions compile at once, in processes that all plans of a step share, unless they are timed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import tfmem
from custom_ops.jit.cores import usable_cores
from graph_passes.analysis.cost import device_costs as profiles
from tfmem.api import make_engine
from tfmem.devices import Target
from tfmem.kernels.fusion_needs import fusion_needs
from tfmem.options import Options
from tfmem.steps.fuser import Fuser

GPU = Target("/device:GPU:0", "NVIDIA H200", 1 << 30, profiles.load("h200"))
CPU = Target("/device:CPU:0", "CPU", 1 << 30, profiles.load("cpu"))


def fuser(tune: Any, target: Target = GPU, observe: bool = True) -> Fuser:
    options = Options(fusion=tfmem.FusionOptions(tune=tune), observe=observe, cache_directory="")
    engine = make_engine(options)
    return Fuser(engine.under(replace(engine.settings, target=target)), trace=None, with_xla=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tune", "observe", "now"),
    [("fast", True, False), ("fast", False, True), ("off", True, False), ("full", True, True)],
)
def test_kernels_that_are_not_timed_compile_at_once(tune: str, observe: bool, now: bool) -> None:
    found = fuser(tune, observe=observe)
    kernels = found.kernels()
    assert (kernels is None) == now
    needs = fusion_needs((), GPU, found.engine.settings.options, kernels=kernels)
    assert needs.at_once == (1 if now else usable_cores())
    assert needs.timed == (tune != "off")


def test_none_are_made_for_a_cpu_unless_they_are_exported() -> None:
    assert fuser("off", CPU).kernels() is None
    options = Options(fusion=tfmem.FusionOptions(architectures=("sm_80", "sm_90")), cache_directory="")
    assert fusion_needs((), CPU, options).at_once == usable_cores()
