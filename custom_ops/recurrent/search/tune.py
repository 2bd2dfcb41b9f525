"""Chooses the kernels of a recurrent cell: for each batch size the fastest of those that the tuner timed (GRNN, section
7.2), and one that stands in where CTAs of a grid cannot wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeAlias, get_args

from custom_ops.errors import KernelError
from custom_ops.jit.cache import Cache
from custom_ops.recurrent.gpu_program import ANY_BATCH, RecurrentProgram
from custom_ops.recurrent.spec import Configuration, Exchange, ProductMethod
from custom_ops.timing import tuner as generic
from custom_ops.timing.tuner import fastest

BATCHES = (1, 8, 64)
TIME_STEPS = 100

Trial: TypeAlias = generic.TunerTrial[Configuration, int]  # at a batch size, over a sweep
Ranked: TypeAlias = tuple[Configuration, float]  # with the nanoseconds that its sweep is predicted to take
Candidates: TypeAlias = Callable[[int], Sequence[Ranked]]  # of a batch, best first


@dataclass(frozen=True)
class TunedRecurrent:
    """The programs for all batch sizes, and how they were found.

    Attributes:
        programs: ascending by `max_batch`; the last takes any. Where one of them exchanges through a grid, the first is
            one that does not, if it runs: for no batch, but to stand in.
        chosen: the trial behind each program, but for that one.
        trials: all of them, batch by batch, each in the order in which they were chosen; that one's is the last.
    """

    programs: tuple[RecurrentProgram, ...]
    chosen: tuple[Trial, ...]
    trials: tuple[Trial, ...]

    def program_of(self, batch: int) -> RecurrentProgram:
        """The one that the op runs for a batch size."""
        return next(program for program in self.programs if program.max_batch >= batch)


class SweepBench(generic.Bench[Configuration, int], Protocol):
    """Where kernels of one specification are built, and sweeps of one length timed; points are batch sizes.
    `custom_ops.recurrent.search.bench.DeviceBench` is real."""

    def build(self, configuration: Configuration, max_batch: int = ANY_BATCH) -> RecurrentProgram:
        """Raises KernelError."""

    def kind(self, configuration: Configuration) -> Hashable:
        """See `generic.Bench`."""
        return configuration.kind

    def parse(self, values: Any) -> Configuration:
        """See `generic.Bench`."""
        found, plain = Configuration(**values), Configuration()
        if any(type(value) is not type(getattr(plain, name)) for name, value in asdict(found).items()):
            raise TypeError(f"{found}: expected {plain} but for the values")
        if found.product not in get_args(ProductMethod) or found.exchange not in get_args(Exchange):
            raise ValueError(f"{found}: no such product or exchange")
        return found

    def name(self, point: int) -> str:
        """See `generic.Bench`."""
        return f"a batch of {point}"


def tune(
    bench: SweepBench,
    candidates: Candidates,
    cache: Cache,
    batches: Sequence[int] = BATCHES,
    top: int | None = 5,
    progress: bool = True,
    without_waiting: Callable[[], Ranked | None] = lambda: None,
) -> TunedRecurrent:
    """Compile, time and choose, or read the choice made before.

    Args:
        bench: of the specification, on the device.
        candidates: configurations for a batch size with their predicted nanoseconds, the best first.
        cache: of choices.
        batches: sizes to choose for. Each choice holds down to the size before it, the last for everything above.
        top: see `custom_ops.timing.tuner.tune`.
        progress: whether to show a bar.
        without_waiting: finds a kernel whose CTAs do not wait for each other, for where those of a grid cannot run at
            once; asked for if a grid is chosen.

    Raises:
        KernelError: no configuration fits the device, or none of them compiles and runs.
    """
    batches = sorted(set(batches))
    trials = generic.tune(bench, candidates, cache, batches, top, progress)
    chosen = _merged([fastest(bench, trials, batch) for batch in batches])
    limits = [*(trial.point for trial in chosen[:-1]), ANY_BATCH]
    programs = [bench.build(trial.configuration, limit) for trial, limit in zip(chosen, limits, strict=True)]
    if any(trial.configuration.exchange == "grid" for trial in chosen) and (launched := without_waiting()):
        try:
            trials += generic.tune(bench, lambda _: [launched], cache, batches[-1:], 1, progress, "without waiting")
            programs.insert(0, bench.build(trials[-1].configuration, max_batch=0))
        except KernelError as error:
            trials.append(generic.TunerTrial(launched[0], batches[-1], launched[1], error=str(error)))
    return TunedRecurrent(tuple(programs), tuple(chosen), tuple(trials))


def _merged(best: Sequence[Trial]) -> list[Trial]:
    """Merge sizes in a row that have one best configuration: the largest stands for them."""
    chosen: list[Trial] = []
    for trial in best:
        if chosen and chosen[-1].configuration == trial.configuration:
            chosen.pop()
        chosen.append(trial)
    return chosen
