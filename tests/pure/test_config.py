"""Budgets and environment variables."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graph_passes.errors import InvalidBudgetError, OptionsError
from graph_passes.passes.fuse.options import FusionOptions
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.recurrent.options import RecurrentOptions
from tfmem.budgets import parse_budget
from tfmem.options import Options, kernel_flags, merged, workspace_limits

GIB = 1 << 30


@pytest.mark.parametrize(
    ("budget", "size"),
    [
        (None, None),
        (123, 123),
        ("10GiB", 10 * GIB),
        ("1.5 GiB", 3 * GIB // 2),
        ("800MB", 800_000_000),
        ("4096", 4096),
        (0.5, 8 * GIB),
        ("0.5", 8 * GIB),
        (1.0, 16 * GIB),
        (np.int64(123), 123),
        (np.float32(0.5), 8 * GIB),
    ],
)
def test_budgets(budget, size):
    assert parse_budget(budget, 16 * GIB) == size


def test_bytes_are_written_in_one_way():
    with pytest.raises(InvalidBudgetError, match="is 17,000,000,000 bytes, but the device has 16,000,000,000;"):
        parse_budget("17GB", 16_000_000_000)
    with pytest.raises(InvalidBudgetError, match="is more than any device has"):
        parse_budget(10**400, 16 * GIB)


BAD_BUDGETS: list[Any] = [0, -1, 0.0, 1.5, -0.5, "", "ten", "10 parsecs", "0GiB", "-3GiB", True, [1], "17GiB"]
BAD_BUDGETS += ["9" * 400, "9" * 5000, "0." + "1" * 5000, "1e3", "nan", "inf", 10**400, 10**5000, -(10**5000), 1 << 62]
BAD_BUDGETS += [float("nan"), float("inf"), np.float64("nan"), np.bool_(True), np.zeros(3), b"1GiB", Fraction(10**400)]
BAD_BUDGETS += [1j, {}, object(), "1 GiB\0", "\u0661GiB"]


@pytest.mark.parametrize("budget", BAD_BUDGETS, ids=range(len(BAD_BUDGETS)))
def test_bad_budgets(budget):
    with pytest.raises(InvalidBudgetError, match="memory_budget=") as caught:
        parse_budget(budget, 16 * GIB)
    assert len(str(caught.value)) < 400  # a message, not the value again


@pytest.mark.parametrize("budget", ["9" * 400, 10**400, "ten", True, float("nan")], ids=range(5))
def test_a_budget_that_fits_no_device_is_refused_with_the_options(budget):
    with pytest.raises(InvalidBudgetError, match="memory_budget="):
        Options(memory_budget=budget)


WRONG: list[tuple[type, str, list[Any]]] = [
    (Options, "passes", ["offload", b"offload", 3, ("teleport",), (None,), ([],), {"offload": 1}]),
    (Options, "offload", [None, {}, "hybrid", OffloadOptions, RecurrentOptions()]),
    (Options, "recurrent", [None, False, {}, OffloadOptions()]),
    (
        Options,
        "input_shapes",
        [None, [("x", (1,))], "x", {"x": 3}, {"x": "34"}, {"x": (1.5,)}, {"x": (None,)}, {1: (1,)}],
    ),
    (Options, "input_shapes", [{1: (1,)}, {"x": (-1,)}, {"x": (True,)}, {"x": (1 << 70,)}, {"": (1,)}]),
    (Options, "fusion", [None, False, {}, "fast", OffloadOptions()]),
    (FusionOptions, "tune", ["always", None, 0, True]),
    (FusionOptions, "xla", [None, "yes", 2]),
    (Options, "device", [None, 0, b"GPU:0", ["GPU:0"]]),
    (Options, "observe", ["no", "0", 0, 1, None, []]),
    (Options, "progress", ["no", 0, 1, None]),
    (Options, "cache_directory", [None, 3, b"/tmp", ["/tmp"], "/tmp/\0", True]),
    (OffloadOptions, "policy", ["magic", None, b"hybrid", ["hybrid"], np.zeros(2)]),
    (OffloadOptions, "prefetch", ["never", None, 1]),
    (OffloadOptions, "copy_start", ["now", None, {}]),
    (OffloadOptions, "mechanism", ["teleport", None, 0]),
    (OffloadOptions, "size_threshold", [-1, 1.5, "large", None, True, 1 << 70, np.zeros(2), [], float("nan")]),
    (OffloadOptions, "reuse_distance", [-1, 1.5, "far", None, True, 1 << 70]),
    (OffloadOptions, "spill_directory", [None, 3, b"/tmp", ["/tmp"], "/tmp/\0"]),
    (OffloadOptions, "spill_budget", [1 << 70, 1 << 63, -1, 1.5, "1GiB", None, True, float("inf"), 10**5000]),
    (OffloadOptions, "split", ["always", None, True, 2]),
    (OffloadOptions, "host_budget", [1 << 70, -1, 1.5, "auto", None, True]),
    (RecurrentOptions, "precision", ["fp8", None, 32, ["tf32"]]),
    (RecurrentOptions, "candidates", [0, -1, 1.5, None, True, "5", 1 << 31]),
    (RecurrentOptions, "time_steps", [0, -1, 1.5, None, True, "5", 1 << 31]),
    (RecurrentOptions, "batches", [(), (0, 1), None, 8, "8", (1.5,), (True,), (None,), (1 << 31,)]),
    (RecurrentOptions, "progress", [None, "no", 0]),
    (FusionOptions, "architectures", [None, 90, "sm_90", ("sm_1",), (90,), (None,)]),
    (RecurrentOptions, "architectures", [None, 90, "sm_90", ("sm_1",), (90,), (None,)]),
]

NESTED = (OffloadOptions, RecurrentOptions, FusionOptions)

CASES = [(options, name, value) for options, name, values in WRONG for value in values]


@pytest.mark.parametrize(
    ("options", "name", "value"), CASES, ids=[f"{name}-{i}" for i, (_, name, _) in enumerate(CASES)]
)
def test_a_wrong_value_is_refused_by_name(options, name, value):
    with pytest.raises(OptionsError, match=f"{name}.*(expected|there are)") as caught:
        options(**{name: value})
    assert len(str(caught.value)) < 400


def test_every_option_has_wrong_values_above():
    fields = {(options, name) for options in (Options, *NESTED) for name in _fields(options)}
    assert fields - {(Options, "memory_budget")} == {(options, name) for options, name, _ in WRONG}


def _fields(options: Any) -> list[str]:
    return list(options.__dataclass_fields__)


@pytest.mark.parametrize(
    ("options", "name", "value", "kept"),
    [
        (Options, "passes", ["offload"], ("offload",)),
        (Options, "input_shapes", {"x": [np.int64(3), 0]}, {"x": (3, 0)}),
        (Options, "observe", np.False_, False),
        (Options, "cache_directory", Path("/a/b"), "/a/b"),
        (OffloadOptions, "spill_directory", Path("/a/b"), "/a/b"),
        (OffloadOptions, "spill_budget", np.int64(5), 5),
        (OffloadOptions, "size_threshold", np.int32(5), 5),
        (RecurrentOptions, "batches", [np.int64(4), 8], (4, 8)),
        (RecurrentOptions, "candidates", np.int64(4), 4),
    ],
)
def test_what_means_the_same_is_taken(options, name, value, kept):
    found = getattr(options(**{name: value}), name)
    assert (found, type(found)) == (kept, type(kept))


def test_without_a_home_directory_there_is_no_cache(monkeypatch):
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # what it does where the user has no entry
    with pytest.raises(RuntimeError):
        Path.home()
    assert Options().cache_directory == ""


@pytest.mark.parametrize("wrong", [{}, "hybrid", OffloadOptions(), Options])
def test_options_are_options(wrong):
    with pytest.raises(OptionsError, match=r"options=.*expected a tfmem.Options"):
        merged(wrong, None, None)


def test_a_policy_is_laid_over_the_options_beside_it():
    options = merged(None, None, "autovm", offload=OffloadOptions(host_budget=7))
    assert (options.offload.policy, options.offload.host_budget) == ("autovm", 7)


def test_environment():
    options = Options.from_env(
        {
            "TFMEM_MEMORY_BUDGET": "2GiB",
            "TFMEM_POLICY": "vdnn_all",
            "TFMEM_SPILL_DIR": "/spill",
            "TFMEM_SPILL_BUDGET": "1MiB",
            "TFMEM_OBSERVE": "0",
            "TFMEM_PROGRESS": "0",
        }
    )
    assert options.memory_budget == "2GiB"
    assert options.offload.policy == "vdnn_all"
    assert options.offload.spill_directory == "/spill"
    assert options.offload.spill_budget == 1 << 20
    assert not options.observe
    assert not options.progress


@pytest.mark.parametrize(
    "environ",
    [
        {"TFMEM_POLICY": "magic"},
        {"TFMEM_OBSERVE": "maybe"},
        {"TFMEM_OBSERVE": ""},
        {"TFMEM_PROGRESS": "yes"},
        {"TFMEM_MEMORY_BUDGET": "lots"},
        {"TFMEM_MEMORY_BUDGET": "9" * 400},
        {"TFMEM_MEMORY_BUDGET": ""},
        {"TFMEM_SPILL_BUDGET": "0.5"},
        {"TFMEM_SPILL_BUDGET": "-1"},
        {"TFMEM_SPILL_BUDGET": "9" * 400},
        {"TFMEM_HOST_BUDGET": "much"},
    ],
)
def test_bad_environment(environ):
    with pytest.raises((OptionsError, InvalidBudgetError), match=next(iter(environ))):
        Options.from_env(environ)


def test_no_limit_can_be_said_in_the_environment():
    assert Options.from_env({"TFMEM_SPILL_BUDGET": "0", "TFMEM_HOST_BUDGET": "0"}).offload == OffloadOptions()


def test_unknown_policy_and_pass_and_option():
    with pytest.raises(OptionsError, match="expected one of optimal"):
        merged(Options(), None, "magic")
    with pytest.raises(OptionsError, match="no pass 'teleport'"):
        merged(Options(), None, None, passes=("teleport",))
    with pytest.raises(
        OptionsError, match=r"no option prefetch; .*; pass offload=tfmem.OffloadOptions\(prefetch=...\)"
    ):
        merged(None, None, None, prefetch="early")
    with pytest.raises(OptionsError, match="no option memory"):
        merged(Options(), None, None, memory=3)


def test_shorthand_wins_over_options():
    options = merged(Options(memory_budget=5), 7, "vdnn_conv")
    assert options.memory_budget == 7
    assert options.offload.policy == "vdnn_conv"


def test_flags_that_choose_kernels():
    given = {"TF_CUDNN_WORKSPACE_LIMIT_IN_MB": "32", "HOME": "/root", "NVIDIA_TF32_OVERRIDE": "0"}
    assert kernel_flags(given) == {"NVIDIA_TF32_OVERRIDE": "0", "TF_CUDNN_WORKSPACE_LIMIT_IN_MB": "32"}


def test_the_workspace_that_tensorflow_allows():
    assert workspace_limits({}) == (8 << 30, 4 << 30)
    assert workspace_limits({"TF_CUDNN_WORKSPACE_LIMIT_IN_MB": "32"}) == (32 << 20, 32 << 20)
    for wrong in ("much", "9" * 5000, "\u0661", "-1", ""):
        assert workspace_limits({"TF_CUDNN_WORKSPACE_LIMIT_IN_MB": wrong}) == (8 << 30, 4 << 30)
