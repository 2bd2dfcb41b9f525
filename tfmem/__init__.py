"""tfmem: train TensorFlow models that need more memory than the device has, replace recurrent layers, fuse small ops.

`tfmem.optimize(x)` does all three. `tfmem.dynamic` (networks whose graph differs per example) and `tfmem.addons`
(TensorFlow Addons) are imported separately; all other public names are here. Importing this module imports neither
TensorFlow nor the op library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from custom_ops.errors import CellError, GradientError, KernelError, OpLibraryError, TfmemError, TfmemWarning
from graph_passes.errors import (
    AlreadyOptimizedError,
    BudgetError,
    GraphError,
    GraphInUseError,
    HostMemoryError,
    InfeasibleBudgetError,
    InvalidBudgetError,
    NoGradientError,
    OptionsError,
    ReplicasError,
    SpillDirectoryError,
    StalePlanError,
    UnknownShapeError,
    VerificationError,
)
from graph_passes.passes.fuse.options import FusionOptions
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.recurrent.options import RecurrentOptions
from graph_passes.plan_file import Plan
from graph_passes.report import Report
from tfmem.options import Options

if TYPE_CHECKING:
    from tfmem.api import explain, load_ops, optimize, report, session_config
    from tfmem.frontends.optimizer import avm_gradients, wrap_optimizer
    from tfmem.html_report import write_html
    from tfmem.planner import plan
    from tfmem.plot import plot_plan, plot_regions, plot_report
    from tfmem.verification import Verification, verify

__version__ = "0.1.0"

_HOMES = {
    "optimize": "tfmem.api",
    "report": "tfmem.api",
    "explain": "tfmem.api",
    "load_ops": "tfmem.api",
    "session_config": "tfmem.api",
    "avm_gradients": "tfmem.frontends.optimizer",
    "wrap_optimizer": "tfmem.frontends.optimizer",
    "plan": "tfmem.planner",
    "plot_plan": "tfmem.plot",
    "plot_regions": "tfmem.plot",
    "plot_report": "tfmem.plot",
    "verify": "tfmem.verification",
    "write_html": "tfmem.html_report",
    "Verification": "tfmem.verification",
}

__all__ = [
    "AlreadyOptimizedError",
    "BudgetError",
    "CellError",
    "FusionOptions",
    "GradientError",
    "GraphError",
    "GraphInUseError",
    "HostMemoryError",
    "InfeasibleBudgetError",
    "InvalidBudgetError",
    "KernelError",
    "NoGradientError",
    "OffloadOptions",
    "OpLibraryError",
    "Options",
    "OptionsError",
    "Plan",
    "RecurrentOptions",
    "ReplicasError",
    "Report",
    "SpillDirectoryError",
    "StalePlanError",
    "TfmemError",
    "TfmemWarning",
    "UnknownShapeError",
    "Verification",
    "VerificationError",
    "avm_gradients",
    "explain",
    "load_ops",
    "optimize",
    "plan",
    "plot_plan",
    "plot_regions",
    "plot_report",
    "report",
    "session_config",
    "verify",
    "wrap_optimizer",
    "write_html",
]


def __getattr__(name: str) -> Any:
    """Import names that need TensorFlow on first use (PEP 562)."""
    if name in ("dynamic", "keras"):
        return import_module(f"tfmem.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tfmem' has no attribute '{name}'")
