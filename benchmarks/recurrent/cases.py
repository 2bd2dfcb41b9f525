"""What the recurrent benchmark runs: pure data, no framework.

The grid is Table 1 of GRNN (Holmes et al., EuroSys 2019), hidden 64, 256, 1024 and batch 1, 10, 20, with hidden 512 and
batch 64 added: 100 steps, input size = hidden size. Then the paper's two models (section 8.5), and the layer that
FlashRNN times (Pöppel et al., 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

UNITS = (64, 256, 512, 1024)
LARGE = (2048,)  # whose weights fit no chip: they are read from L2 in every step
BATCHES = (1, 10, 20, 64)
STEPS = 100
LONG = 1024  # of FlashRNN's layer
TOP = 5  # of the model's first, that are compiled and timed
WITHOUT_TF32 = ", no TF32"  # behind a case's name in the results of benchmarks.recurrent.keras
# the blocks [units, units] of recurrent weights; input weights have as many
BLOCKS: Mapping[str, int] = {"lstm": 4, "gru": 3, "canonical_gru": 3}
# synchronisations that a step of each cell cannot do without (GRNN, section 5)
STAGES: Mapping[str, int] = {"lstm": 1, "gru": 1, "canonical_gru": 2}
# of float32 accuracy: what a result may be off from float64 (norm of the difference over the norm)
BOUNDS: Mapping[str, float] = {"highest": 1e-5, "tf32": 5e-3, "bfloat16": 5e-2, "float16": 5e-3}


@dataclass(frozen=True)
class Case:
    """One layer or stack of layers, forward or with its gradient.

    Attributes:
        layer: a key of `BLOCKS`. `gru` is Keras's default and cuDNN's (`reset_after`), `canonical_gru` the paper's.
        units: hidden size, and input size.
        batch: sequences at once.
        steps: their length.
        layers: how many layers are stacked.
        training: forward and backward, gradients of weights, input and initial state.
    """

    layer: str
    units: int
    batch: int
    steps: int = STEPS
    layers: int = 1
    training: bool = False

    @property
    def precisions(self) -> tuple[str, ...]:
        """What our kernels are measured in: float32's accuracy; TF32, against peers that may use it; 16-bit storage."""
        if self.plain_lstm and (self.batch == 20 or self.steps == LONG) and not self.training:
            return tuple(BOUNDS)
        return ("highest", "tf32")

    @property
    def plain_lstm(self) -> bool:
        """Whether it is what 16-bit storage is compared on."""
        return self.layer == "lstm" and self.layers == 1

    @property
    def name(self) -> str:
        """Unique: `lstm/256/10`, `train/lstm/256/10`, `stack3/lstm/128/1/100`, `lstm/768/16/1024`."""
        words = [self.layer, str(self.units), str(self.batch)]
        if self.training:
            words.insert(0, "train")
        if self.layers > 1:
            words.insert(0, f"stack{self.layers}")
        if self.layers > 1 or self.steps != STEPS:
            words.append(str(self.steps))
        return "/".join(words)


@dataclass(frozen=True)
class Floor:
    """What no kernel can beat, each part in milliseconds; the parts of one row add up.

    Attributes:
        arithmetic: all FMAs, of the input product and of the recurrence, over the rate of the whole chip.
        memory: weights, input and output once over device memory; it can overlap `arithmetic`.
        barriers: the step's synchronisations, one after the other.
    """

    arithmetic: float
    memory: float
    barriers: float

    @property
    def total(self) -> float:
        """Milliseconds."""
        return max(self.arithmetic, self.memory) + self.barriers


@dataclass(frozen=True)
class Chip:
    """The rates a floor is made of. The defaults are an H200, fp32 (measured where the project's design says so)."""

    fmas_per_second: float = 132 * 128 * 1.98e9
    bytes_per_second: float = 4.3e12
    cluster_barrier_seconds: float = 0.22e-6
    grid_barrier_seconds: float = 1.0e-6
    multiprocessor_bytes: int = (256 << 10) + (227 << 10)  # registers and shared memory
    cluster: int = 16


def floor(case: Case, chip: Chip) -> Floor:
    """The floor of a forward pass in fp32; of training, three times its arithmetic and twice its barriers.

    Weights that fit the registers and the shared memory of one cluster need only its barrier.
    """
    blocks, words = BLOCKS[case.layer], case.units * case.units
    passes = 3 if case.training else 1
    fmas = 2 * blocks * words * case.batch * case.steps * case.layers * passes
    weights = 2 * blocks * words * case.layers
    sequences = 2 * case.steps * case.batch * case.units * case.layers
    fits_cluster = 4 * blocks * words <= chip.cluster * chip.multiprocessor_bytes
    barrier = chip.cluster_barrier_seconds if fits_cluster else chip.grid_barrier_seconds
    if 4 * blocks * words <= chip.multiprocessor_bytes // 2:  # one CTA holds them, beside all else
        barrier = 0.0
    waits = case.steps * case.layers * STAGES[case.layer] * (2 if case.training else 1)
    return Floor(
        arithmetic=1e3 * fmas / chip.fmas_per_second,
        memory=1e3 * 4 * passes * (weights + sequences) / chip.bytes_per_second,
        barriers=1e3 * waits * barrier,
    )


def kernel_in_words(configuration: Mapping[str, Any]) -> str:
    """A kernel's configuration, as tables show it."""
    sliced = f", {configuration['slices']} slices" if configuration["slices"] > 1 else ""
    shape = f"{configuration['rows']} rows, {configuration['ctas']} x {configuration['threads']}"
    return f"{configuration['exchange']}{sliced}, {configuration['product']}, {shape}"


def all_cases() -> list[Case]:
    """Every case, those that the goals name first."""
    cases = [Case("lstm", units, batch) for units in UNITS for batch in BATCHES]
    cases += [Case("canonical_gru", units, batch) for units in UNITS for batch in BATCHES]
    cases += [Case("lstm", units, batch, training=True) for units in UNITS for batch in BATCHES]
    cases += [Case("lstm", 128, batch, layers=3) for batch in BATCHES]  # char-RNN
    cases += [Case("lstm", 256, batch, steps=20, layers=2) for batch in BATCHES]  # text classification
    cases += [Case("gru", units, batch) for units in UNITS for batch in BATCHES]
    cases += [Case("gru", units, batch, training=True) for units in UNITS for batch in (1, 20)]
    cases += [Case("lstm", units, batch) for units in LARGE for batch in BATCHES]
    cases += [Case("lstm", 768, 16, steps=LONG)]
    return cases


def single_passes() -> list[Case]:
    """The cases of one kernel alone: forward, one layer."""
    return [case for case in all_cases() if not case.training and case.layers == 1]


def fastest(
    systems: Mapping[str, Mapping[str, Any]], tfmem: bool, kind: str = "", tf32: bool | None = None
) -> tuple[str, float] | None:
    """Name and milliseconds of the fastest fp32 system that is tfmem's, or is not; 16-bit peers are context.

    `kind` is "plain" for calls that are enqueued one by one, "graph" for a CUDA graph's replay, "" for either; `tf32`
    says whether its products may round to TF32, None for either; for tfmem's, None is False.
    """
    ours = "tfmem tf32" if tf32 else "tfmem highest"
    found = [
        (outcome["ms"], name)
        for name, outcome in systems.items()
        if outcome["status"] == "ok"
        and name.endswith(kind)
        and (tfmem or tf32 is None or tf32 == ("tf32" in name))
        and (name.startswith(ours) if tfmem else not name.startswith("tfmem") and "float16" not in name)
    ]
    return (min(found)[1], min(found)[0]) if found else None
