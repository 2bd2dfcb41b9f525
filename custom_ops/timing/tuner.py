"""Chooses configurations of a kernel by running them: the best ranked for each point are compiled and timed, then more
of the kind that was the fastest. What was found is cached under all that it depends on.

A point is what a choice is made for: a batch size, a shape. A configuration is a frozen dataclass of plain values."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil
from sys import maxsize
from typing import Any, Generic, NoReturn, Protocol, TypeAlias, TypeVar

from tqdm import tqdm

from custom_ops.background import go_on
from custom_ops.errors import KernelError
from custom_ops.jit.cache import Cache
from custom_ops.jit.cores import usable_cores
from custom_ops.timing import rounds
from custom_ops.timing.remembered import Remembered

FORMAT = "tuned 5"
NEVER = float("inf")
AT_FIRST = 0.6  # of what is timed: the best of each kind, where kinds are close
ROUNDS = 4  # of as many further ones, while none has run

C = TypeVar("C", bound=Hashable)  # a configuration
P = TypeVar("P", bound=Hashable)  # a point: a number or a string
P_contra = TypeVar("P_contra", bound=Hashable, contravariant=True)  # the same, of what only takes one
Candidates: TypeAlias = Callable[[P], Sequence[tuple[C, float]]]  # best first, with the nanoseconds predicted


@dataclass(frozen=True)
class MeasuredKernel:
    """A kernel as it ran: nanoseconds, registers of a thread, bytes of its local memory (spilled ones)."""

    nanoseconds: float
    registers: int
    local: int


@dataclass(frozen=True)
class TunerTrial(Generic[C, P]):
    """What came of one configuration.

    Attributes:
        configuration: the compiled one.
        point: at which it was timed.
        predicted: nanoseconds, by the model.
        measured: nanoseconds; infinite where it failed.
        registers: of a thread.
        local: bytes of a thread's local memory: spilled registers.
        error: why it failed, or "".
    """

    configuration: C
    point: P
    predicted: float
    measured: float = NEVER
    registers: int = 0
    local: int = 0
    error: str = ""


class Bench(Protocol[C, P_contra]):
    """Where kernels that compute one thing are compiled and timed.

    Attributes:
        identity: all that a time depends on but for configuration and point, as one name.
    """

    identity: str

    def compile(self, configurations: Sequence[C]) -> None:
        """Compile ahead, so that `measure` is quick; called from several threads."""

    def measure(self, configuration: C, point: P_contra) -> MeasuredKernel:
        """Time one configuration; other users of the device wait meanwhile. Raises KernelError."""

    def kind(self, configuration: C) -> Hashable:
        """A key that is equal for configurations between which the model errs little."""

    def parse(self, values: Any) -> C:
        """The configuration that `asdict` made `values` of; ValueError or TypeError if there is none."""

    def name(self, point: P_contra) -> str:
        """The name of a point in errors: "a batch of 8"."""


def tune(
    bench: Bench[C, P],
    candidates: Candidates[P, C],
    cache: Cache,
    points: Sequence[P],
    top: int | None = 5,
    progress: bool = True,
    purpose: str = "",
) -> list[TunerTrial[C, P]]:
    """Compile and time, or read what was found before.

    Args:
        bench: of what the kernels compute, on the device.
        candidates: configurations for a point with their predicted nanoseconds, the best first.
        cache: of what was found.
        points: to choose for.
        top: how many are timed at each: `AT_FIRST` of them the best ranked, the others the next of the kind that was
            the fastest of these; None for all. While none of them runs, as many of the next.
        progress: whether to show a bar.
        purpose: tells apart searches of one bench among other candidates.

    Returns:
        All trials, point by point, in the order in which they were chosen. At least one runs at each point.

    Raises:
        KernelError: no configuration fits the device at one of the points, or none of them compiles and runs.
    """

    def made() -> list[TunerTrial[C, P]]:
        trials = _timed(bench, candidates, points, top, progress)
        _require_one_each(bench, trials, points)  # before it is kept: a failure may be another program's on the device
        return trials

    kept = remembered(bench, cache, points)
    return kept.get(_key(kept, bench, points, top, purpose), made)


def known(bench: Bench[C, P], cache: Cache, points: Sequence[P], top: int | None = 5) -> list[TunerTrial[C, P]]:
    """What `tune` found before with these arguments; nothing if it did not run."""
    kept = remembered(bench, cache, points)
    return kept.find(_key(kept, bench, points, top, "")) or []


def _key(
    kept: Remembered[list[TunerTrial[C, P]]], bench: Bench[C, P], points: Sequence[P], top: int | None, purpose: str
) -> str:
    return kept.key(bench.identity, str(list(points)), str(top), purpose)


def remembered(bench: Bench[C, P], cache: Cache, points: Sequence[P]) -> Remembered[list[TunerTrial[C, P]]]:
    """What `tune` keeps."""
    return Remembered(FORMAT, cache, lambda trials: [asdict(trial) for trial in trials], partial(_kept, bench, points))


def fastest(bench: Bench[C, P], trials: Sequence[TunerTrial[C, P]], point: P) -> TunerTrial[C, P]:
    """The fastest of all trials at `point`.

    Raises:
        KernelError: there are none, or none ran.
    """
    at_point = [trial for trial in trials if trial.point == point]
    if not at_point:
        raise KernelError(f"no configuration fits the device with {bench.name(point)}")
    best = rounds.fastest([trial.measured for trial in at_point])
    if best is None:
        raise KernelError(f"none of {len(at_point)} kernels runs with {bench.name(point)}: {at_point[0].error}")
    return at_point[best]


def timed(bench: Bench[C, P], trial: TunerTrial[C, P]) -> TunerTrial[C, P]:
    """`trial` with what was measured, or with what went wrong."""
    try:
        measured = bench.measure(trial.configuration, trial.point)
    except KernelError as error:
        return replace(trial, measured=NEVER, error=str(error))
    return replace(trial, measured=measured.nanoseconds, registers=measured.registers, local=measured.local)


def _require_one_each(bench: Bench[C, P], trials: Sequence[TunerTrial[C, P]], points: Sequence[P]) -> None:
    for point in points:
        fastest(bench, trials, point)


def _kept(bench: Bench[C, P], points: Sequence[P], values: Any) -> list[TunerTrial[C, P]]:
    """The trials that a file of the cache holds.

    Raises:
        ValueError: it holds something else.
    """
    try:
        trials = [_trial(bench, value, points) for value in values]
        _require_one_each(bench, trials, points)
    except KernelError as error:
        raise ValueError(str(error)) from error
    return trials


def _trial(bench: Bench[C, P], values: Any, points: Sequence[P]) -> TunerTrial[C, P]:
    trial: TunerTrial[C, P] = TunerTrial(**{**values, "configuration": bench.parse(values["configuration"])})
    counts, times = (trial.registers, trial.local), (trial.predicted, trial.measured)
    if not all(type(count) is int and count >= 0 for count in counts) or not all(map(_is_time, times)):
        raise ValueError(f"{trial}: expected counts and times of 0 or more")
    if (type(trial.point), trial.point) not in [(type(point), point) for point in points]:
        raise ValueError(f"{trial}: expected one of the points {points}")
    return trial


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and float(value) >= 0  # nor is NaN


def _timed(
    bench: Bench[C, P], candidates: Candidates[P, C], points: Sequence[P], top: int | None, progress: bool
) -> list[TunerTrial[C, P]]:
    """All trials, run, point by point.

    To list and rank what there is for a point takes a while, and so does compiling: what is compiled for others is
    compiled meanwhile."""
    count = maxsize if top is None else top
    first = count if top is None else ceil(AT_FIRST * top)
    trials: dict[P, list[TunerTrial[C, P]]] = {}
    others: dict[P, list[TunerTrial[C, P]]] = {}
    found: dict[tuple[P, C], TunerTrial[C, P]] = {}
    with ThreadPoolExecutor(usable_cores()) as pool, _bar(progress) as bar:
        runner = _Runner(bench, pool, bar)
        for point in points:
            ranked = [TunerTrial(configuration, point, predicted) for configuration, predicted in candidates(point)]
            trials[point], others[point] = ranked[:first], ranked[first:]
            runner.add(trials[point])
        while done := runner.some():
            found |= {(trial.point, trial.configuration): trial for trial in done}
            for point in {trial.point for trial in done}:
                ran = [found[key] for trial in trials[point] if (key := (point, trial.configuration)) in found]
                if len(ran) == len(trials[point]):
                    more = _more(bench, ran, others[point], count)
                    others[point] = [trial for trial in others[point] if trial not in more]
                    trials[point] += more
                    runner.add(more)
    return [found[point, trial.configuration] for point in points for trial in trials[point]]


def _more(
    bench: Bench[C, P], measured: Sequence[TunerTrial[C, P]], others: Sequence[TunerTrial[C, P]], count: int
) -> Sequence[TunerTrial[C, P]]:
    """Which of `others`, ranked, are timed next: up to `count` in all, those first that are of the kind of the fastest,
    since the model errs more between kinds than within one; while none has run, as many of the next."""
    if all(trial.measured == NEVER for trial in measured):
        return others[:count] if len(measured) < ROUNDS * count else ()
    kind = bench.kind(min(measured, key=lambda trial: trial.measured).configuration)
    return sorted(others, key=lambda trial: bench.kind(trial.configuration) != kind)[: max(0, count - len(measured))]


def _bar(progress: bool) -> tqdm[NoReturn]:
    return tqdm(desc="tuning kernels", unit="kernel", total=0, leave=False, disable=not progress)


class _Runner(Generic[C, P]):
    """Compiles in as many processes as there are cores for this one, each kernel once; runs one at a time on the
    device."""

    def __init__(self, bench: Bench[C, P], pool: ThreadPoolExecutor, bar: tqdm[NoReturn]) -> None:
        self._bench: Bench[C, P] = bench
        self._pool, self._bar = pool, bar
        self._compiling: dict[C, Future[None]] = {}
        self._waiting: list[TunerTrial[C, P]] = []

    def add(self, trials: Sequence[TunerTrial[C, P]]) -> None:
        """Begin to compile."""
        self._waiting += trials
        self._bar.total += len(trials)
        new = [trial.configuration for trial in trials if trial.configuration not in self._compiling]
        shares = min(usable_cores(), len(new))
        for share in (new[first::shares] for first in range(shares)):
            self._compiling |= dict.fromkeys(share, self._pool.submit(self._bench.compile, share))

    def some(self) -> list[TunerTrial[C, P]]:
        """Some of what was added, each with what was measured; nothing if nothing is left."""
        go_on()
        self._bar.refresh()
        if not self._waiting:
            return []
        wait({self._compiling[trial.configuration] for trial in self._waiting}, return_when=FIRST_COMPLETED)
        ready = [trial for trial in self._waiting if self._compiling[trial.configuration].done()]
        self._waiting = [trial for trial in self._waiting if trial not in ready]
        measured = []
        for trial in ready:
            self._compiling[trial.configuration].result()
            measured.append(timed(self._bench, trial))
            self._bar.update()
        return measured
