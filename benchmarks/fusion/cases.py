"""What is measured, as data: the workloads, the systems that run them, and the settings of a run."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any

# in the order of the notes, not of the paper's Table 3
TEN = ("logistic", "word2vec", "birnn", "dynrnn", "mlp", "vae", "nmt", "multi_interests", "rokid", "aiwriter")
OTHERS = ("dynrnn_if", "word2vec_evaluation")  # the same networks in another form, or in use
LARGE = ("large/layer_norm_gradient", "large/softmax_dropout", "large/column_sums")
MODELS = ("models/resnet50", "models/bert_base")
# "tfmem" runs every pass, "fusion" the fusion pass alone: another system only where recurrent kernels run
SYSTEMS = ("graph", "auto-jit", "jit_compile", "tfmem", "fusion")
RECURRENT = ("birnn", "dynrnn")  # the recurrent pass replaces their layers; tests/tf/test_fusion_benchmark.py counts
OF_XLA = ("auto-jit", "jit_compile")
DEFAULT = "tfmem by default"  # with default options; "tfmem" is with all passes
OF_TFMEM = ("tfmem", "fusion", DEFAULT)
COPY = "copy"  # a system beside those: large tensors are held against how fast one is copied
FLAGS_OF_XLA = ("TF_XLA_FLAGS", "XLA_FLAGS")


@dataclass(frozen=True)
class Case:
    """A workload, under one set of settings.

    Attributes:
        workload: its module.
        settings: how the name of its row ends.
    """

    workload: str
    settings: str = ""

    @property
    def name(self) -> str:
        """The name of the row in the results."""
        return f"{self.workload}{self.settings}"


def settings(options: argparse.Namespace) -> str:
    """What the name of a row says of settings that are not as usual."""
    given = {
        "remapper": options.remapper,
        "without TF32": options.no_tf32,
        "deterministic": options.deterministic,
        options.label: bool(options.label),
    }
    return "".join(f", {name}" for name, on in given.items() if on)


def task_of(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """What `benchmarks.fusion.worker` is to do, and the flags of XLA that it does it under."""
    return {
        "workload": case.workload,
        "asked": [name for name in options.systems if name != "fusion" or case.workload in RECURRENT],
        "warm_up": options.warm_up,
        "steps": options.steps,
        "block": options.block,
        "parity": options.parity,
        "settle": options.settle,
        "patience": options.patience,
        "remapper": options.remapper,
        "tf32": not options.no_tf32,
        "deterministic": options.deterministic,
        "flags": {name: os.environ[name] for name in FLAGS_OF_XLA if name in os.environ},
    }
