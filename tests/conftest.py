"""A test is marked by the folder it lies in: tests/pure, tests/tf, tests/jit, tests/gpu; `--long` chooses long ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import compiled
from tests.tiers import Tier, is_sampled

# Read by TensorFlow when it is first imported, so it is set before any test module is.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# TensorFlow turns oneDNN on by itself on some processors only; without it the CPU's allocator keeps no statistics.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

TIERS = ("pure", "tf", "jit", "gpu")
TESTS = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", default="none", help="long tests: none, all, only (and no short ones), or a fifth: 2/5")


def pytest_configure(config: pytest.Config) -> None:
    try:
        tier = Tier.parse(config.getoption("--long"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[TIER] = tier
    # How long an example takes is the machine's affair: pytest-timeout ends a test that hangs.
    settings.register_profile(
        "tfmem", max_examples=tier.examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("tfmem")


TIER = pytest.StashKey[Tier]()


@pytest.hookimpl(trylast=True)  # hypothesis has marked its tests by now
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in TIERS:
            item.add_marker(folder)
    tier, seen = config.stash[TIER], dict[tuple[str, int], list[str]]()
    takes = [
        tier.takes(item.nodeid, _is_long(item, seen), item.get_closest_marker("hypothesis") is not None)
        for item in items
    ]
    left_out = [item for item, taken in zip(items, takes, strict=True) if not taken]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item, taken in zip(items, takes, strict=True) if taken]
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if on_gpu else None
    if reason:
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


def _is_long(item: pytest.Item, seen: dict[tuple[str, int], list[str]]) -> bool:
    """Whether a test is long; `seen` grows by the values of parameters that a sampled test has, in their order."""
    sampled, callspec = item.get_closest_marker("sampled"), getattr(item, "callspec", None)
    if item.get_closest_marker("long") or not sampled or not callspec:
        return item.get_closest_marker("long") is not None
    places = []
    for number, value in enumerate(callspec._idlist):  # of each `parametrize` one
        values = seen.setdefault((item.nodeid.partition("[")[0], number), [])
        if value not in values:
            values.append(value)
        places.append(values.index(value))
    return not is_sampled(places, *sampled.args)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # xdist's workers leave it to the process that began them
        compiled.prune()


def _why_no_gpu() -> str | None:
    import tensorflow as tf

    if tf.config.list_physical_devices("GPU"):
        return None
    if not tf.test.is_built_with_cuda():
        return f"TensorFlow {tf.__version__} here is built without CUDA"
    return "TensorFlow finds no GPU on this machine"
