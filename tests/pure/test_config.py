"""Budgets and environment variables."""

import pytest

from graph_passes.errors import InvalidBudgetError, OptionsError
from tfmem.config import Options, kernel_flags, merged, parse_budget, workspace_limits

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
    ],
)
def test_budgets(budget, size):
    assert parse_budget(budget, 16 * GIB) == size


BAD_BUDGETS = [0, -1, 0.0, 1.5, -0.5, "", "ten", "10 parsecs", "0GiB", "-3GiB", True, [1], "17GiB"]


@pytest.mark.parametrize("budget", BAD_BUDGETS)
def test_bad_budgets(budget):
    with pytest.raises(InvalidBudgetError, match="memory_budget="):
        parse_budget(budget, 16 * GIB)


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
        {"TFMEM_PROGRESS": "yes"},
        {"TFMEM_MEMORY_BUDGET": "lots"},
    ],
)
def test_bad_environment(environ):
    with pytest.raises((OptionsError, InvalidBudgetError)):
        Options.from_env(environ)


def test_unknown_policy_and_pass_and_option():
    with pytest.raises(OptionsError, match="expected one of autovm"):
        merged(Options(), None, "magic")
    with pytest.raises(OptionsError, match="no pass 'teleport'"):
        merged(Options(), None, None, passes=("teleport",))
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
    assert workspace_limits({"TF_CUDNN_WORKSPACE_LIMIT_IN_MB": "much"}) == (8 << 30, 4 << 30)
