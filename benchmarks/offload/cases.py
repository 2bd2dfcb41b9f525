"""What the offload benchmark runs: pure data, no TensorFlow.

Table 6.2 of the AutoVM thesis varies the normalised memory `N_m`: what training needs over what the
device has. Here the batch is fixed and the device is capped: cap = uncapped peak / N_m."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

NORMALISED = (0.5, 1.0, 1.25, 1.5, 2.0, 2.5)  # the columns of Table 6.2, and one between
PARITY_NORMALISED = 1.5
# how the last part of a case's name sets the case: "tfmem" runs the command line's policy
SYSTEMS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"system": "plain"},
    "tfmem": {"system": "tfmem"},
    "hybrid": {"system": "tfmem", "policy": "hybrid"},
}


@dataclass(frozen=True)
class Case:
    """One configuration, run in a separate process.

    Attributes:
        name: unique; `vgg19/1.5/plain`.
        network: `vgg19`, `resnet152` or `alexnet`.
        form: how the step is written: `function` (tf.function, GradientTape), `graph`
            (tf.compat.v1, Listing 6.1) or `keras` (`model.train_on_batch`).
        system: `plain` TensorFlow, or `tfmem`.
        normalised: N_m; 0 for no cap, or the headline's.
        headline: whether the cap is `Sizes.headline_cap`.
        policy: tfmem's policy; the command line's if empty.
        deterministic: whether TensorFlow's op determinism is on, and convolutions get by with little workspace so that
            cuDNN's choice does not depend on the memory that is left: for the parity of losses.
    """

    name: str
    network: str
    form: str
    system: str
    normalised: float = 0.0
    headline: bool = False
    policy: str = ""
    deterministic: bool = False

    @property
    def oracle(self) -> str:
        """The name of the uncapped run that this one is held against."""
        return f"{self.network}/oracle"

    def cap(self, sizes: Sizes, cases: Mapping[str, Mapping[str, Any]]) -> int | None:
        """Bytes the device is capped at, from the oracle's result in `cases`; None for no cap.

        Raises:
            LookupError: the oracle has not run.
        """
        if self.headline:
            return sizes.headline_cap
        if not self.normalised:
            return None
        if cases.get(self.oracle, {}).get("status") != "ok":
            raise LookupError(f"{self.name} needs the peak of {self.oracle}, which has not run")
        return int(cases[self.oracle]["peak"] / self.normalised)


@dataclass(frozen=True)
class Sizes:
    """How large the networks are: batch sizes by network, and the rest alike for all.

    `headline_cap` is in bytes, for VGG-19 alone.
    """

    headline_cap: int
    batches: Mapping[str, int]
    image_size: int = 224
    classes: int = 1000
    width: float = 1.0


# VGG-19 at batch 256 needs about 24 GiB
FULL = Sizes(int(19.5 * (1 << 30)), {"vgg19": 256, "resnet152": 128, "alexnet": 2048})
# the same cases on a CPU in seconds; nothing caps a CPU's memory, so `plain` runs are uncapped
TINY = Sizes(24 << 20, {"vgg19": 32, "resnet152": 32, "alexnet": 64}, image_size=64, classes=10, width=0.125)


@dataclass(frozen=True)
class Size:
    """How large a network is at full size.

    Attributes:
        batch: rows of a batch.
        side: pixels of an image's side, or words of a text.
    """

    batch: int
    side: int


NETWORKS = {  # those of `benchmarks.offload.networks`
    "vgg19": Size(256, 224),
    "resnet152": Size(128, 224),
    "resnet50": Size(128, 224),
    "unet": Size(16, 512),
    "bert": Size(32, 512),
    "alexnet": Size(2048, 224),
}


def all_cases() -> list[Case]:
    """Every case, in the order to run them: an oracle before those that need its peak."""
    cases = [Case("link", "", "", "link")]
    for network in FULL.batches:
        cases.append(Case(f"{network}/oracle", network, "function", "plain"))
        if network == "vgg19":
            cases += _headline()
        for normalised in NORMALISED:
            for name in SYSTEMS:
                case = Case(f"{network}/{normalised}/{name}", network, "function", **SYSTEMS[name])
                cases.append(replace(case, normalised=normalised))
    return cases


def _headline() -> list[Case]:
    """VGG-19, batch 256, in 19.5 GiB, in each of the three forms; and the parity of its losses."""
    cases = [Case(f"vgg19/{form}/oracle", "vgg19", form, "plain") for form in ("graph", "keras")]
    for form in ("graph", "function", "keras"):
        start = f"vgg19/19.5GiB/{form}"
        cases += [Case(f"{start}/{name}", "vgg19", form, **SYSTEMS[name], headline=True) for name in SYSTEMS]
    for name in SYSTEMS:
        case = Case(f"vgg19/parity/{name}", "vgg19", "function", **SYSTEMS[name], deterministic=True)
        cases.append(replace(case, normalised=PARITY_NORMALISED if case.system == "tfmem" else 0.0))
    return cases
