"""Benchmarks wait for all that tfmem looks for in threads while a step runs."""

from __future__ import annotations

import pkgutil
from dataclasses import replace
from importlib import import_module

from benchmarks.decided import MEANWHILE, is_decided
from graph_passes.decision import Decision, Fusion
from graph_passes.report import Report
from tfmem import steps


def test_all_that_is_said_meanwhile_is_waited_for() -> None:
    modules = [import_module(f"{steps.__name__}.{found.name}") for found in pkgutil.iter_modules(steps.__path__)]
    said = {module.MEANWHILE for module in modules if isinstance(getattr(module, "MEANWHILE", None), str)}
    assert said == set(MEANWHILE)
    report = Report("step", "/device:CPU:0", "autovm", Decision.MOVED, 1, 1)
    assert is_decided(report)
    assert not any(is_decided(replace(report, notes=(*report.notes, note))) for note in MEANWHILE)
    assert not is_decided(replace(report, fusion_state=Fusion.UNDECIDED))
