"""Chooses the configurations of a recurrent kernel by running them: the best ranked of each batch size are compiled and
timed on the device, then more of the kind that was the fastest, and the fastest of all is kept (GRNN, section 7.2).
Choices are cached under all that they depend on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from math import ceil
from sys import maxsize
from typing import Any, NoReturn, Protocol, TypeAlias, get_args

from tqdm import tqdm

from custom_ops.errors import KernelError
from custom_ops.jit.cache import Cache, UnusableError, digest
from custom_ops.jit.cores import usable_cores
from custom_ops.recurrent.program import ANY_BATCH, Program
from custom_ops.spec import Configuration, Exchange, Product, RecurrentSpec

FORMAT = "tuned 4"
BATCHES = (1, 8, 64)
TIME_STEPS = 100
NEVER = float("inf")
AT_FIRST = 0.6  # of what is timed: the best of each kind, where kinds are close

Ranked: TypeAlias = tuple[Configuration, float]  # with the nanoseconds that its sweep is predicted to take
Candidates: TypeAlias = Callable[[int], Sequence[Ranked]]  # of a batch, best first


@dataclass(frozen=True)
class Measured:
    """A kernel as it ran: nanoseconds of a sweep, registers of a thread, bytes of its local memory (spilled ones)."""

    nanoseconds: float
    registers: int
    local: int


@dataclass(frozen=True)
class Trial:
    """What came of one configuration.

    Attributes:
        configuration: as it was compiled.
        batch: that it was timed with.
        predicted: nanoseconds of a sweep, by the model.
        measured: nanoseconds of a sweep; infinite where it failed.
        registers: of a thread.
        local: bytes of a thread's local memory: spilled registers.
        error: why it failed, or "".
    """

    configuration: Configuration
    batch: int
    predicted: float
    measured: float = NEVER
    registers: int = 0
    local: int = 0
    error: str = ""


@dataclass(frozen=True)
class TunedRecurrent:
    """The programs for all batch sizes, and how they were found.

    Attributes:
        programs: ascending by `max_batch`; the last takes any. Where one of them exchanges through a grid, the first is
            one that does not, if it runs: for no batch, but to stand in.
        chosen: the trial behind each program, but for that one.
        trials: all of them, in the order in which they were chosen, batch by batch; that one's is the last.
    """

    programs: tuple[Program, ...]
    chosen: tuple[Trial, ...]
    trials: tuple[Trial, ...]

    def program_of(self, batch: int) -> Program:
        """The one that the op runs for a batch size."""
        return next(program for program in self.programs if program.max_batch >= batch)


class Bench(Protocol):
    """Where kernels of one specification are built and timed; `custom_ops.recurrent.bench.DeviceBench` is real."""

    spec: RecurrentSpec
    identity: str

    def compile(self, configurations: Sequence[Configuration]) -> None:
        """So that `build` will be quick; called from several threads."""

    def build(self, configuration: Configuration, max_batch: int = ANY_BATCH) -> Program:
        """Raises KernelError."""

    def measure(self, configuration: Configuration, batch: int, time_steps: int) -> Measured:
        """Raises KernelError."""


def tune(
    bench: Bench,
    candidates: Candidates,
    cache: Cache,
    batches: Sequence[int] = BATCHES,
    time_steps: int = TIME_STEPS,
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
        time_steps: length of the sweeps that are timed.
        top: how many are timed: `AT_FIRST` of them the best ranked, the others the next of the kind that was the
            fastest of these; None for all.
        progress: whether to show a bar.
        without_waiting: finds a kernel whose blocks do not wait for each other, for where those of a grid, if one is
            chosen, cannot run at once; asked for once a grid is tried.

    Raises:
        KernelError: no configuration fits the device, or none of them compiles and runs.
    """
    batches = sorted(set(batches))

    def made() -> bytes:
        trials = _timed(bench, candidates, batches, time_steps, top, progress, without_waiting)
        _chosen(trials, batches)  # before it is kept: a failure may be another program's on the device
        return json.dumps([asdict(trial) for trial in trials]).encode()

    key = digest(FORMAT, bench.identity, str(batches), str(time_steps), str(top))
    trials = cache.read(key, made, lambda data: _kept(data, batches))
    chosen = _chosen(trials, batches)
    limits = [*(trial.batch for trial in chosen[:-1]), ANY_BATCH]
    programs = [bench.build(trial.configuration, limit) for trial, limit in zip(chosen, limits, strict=True)]
    launched = [trial for trial in trials if trial.configuration.exchange == "launches" and trial.measured < NEVER]
    if launched and any(map(_is_grid, chosen)):
        programs.insert(0, bench.build(launched[-1].configuration, max_batch=0))
    return TunedRecurrent(tuple(programs), tuple(chosen), tuple(trials))


def _kept(data: bytes, batches: Sequence[int]) -> list[Trial]:
    """The trials that a file of the cache holds.

    Raises:
        UnusableError: it holds something else.
    """
    try:
        trials = [_trial(values) for values in json.loads(data)]
        _chosen(trials, batches)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, KernelError) as error:
        raise UnusableError(str(error)) from error
    return trials


def _trial(values: Any) -> Trial:
    trial = Trial(**{**values, "configuration": Configuration(**values["configuration"])})
    plain = Configuration()
    if any(type(value) is not type(getattr(plain, name)) for name, value in asdict(trial.configuration).items()):
        raise TypeError(f"{trial.configuration}: expected {plain} but for the values")
    if trial.configuration.product not in get_args(Product) or trial.configuration.exchange not in get_args(Exchange):
        raise ValueError(f"{trial.configuration}: no such product or exchange")
    counts, times = (trial.batch, trial.registers, trial.local), (trial.predicted, trial.measured)
    if not all(type(count) is int and count >= 0 for count in counts) or not all(map(_is_time, times)):
        raise ValueError(f"{trial}: expected counts and times of 0 or more")
    return trial


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0  # nor is NaN


def _is_grid(trial: Trial) -> bool:
    return trial.configuration.exchange == "grid"


def _timed(
    bench: Bench,
    candidates: Candidates,
    batches: Sequence[int],
    time_steps: int,
    top: int | None,
    progress: bool,
    without_waiting: Callable[[], Ranked | None],
) -> list[Trial]:
    """All trials, run, batch by batch.

    To list and rank what there is for a batch takes a while, and so does compiling: what is compiled for others is
    compiled meanwhile."""
    count = maxsize if top is None else top
    first = count if top is None else ceil(AT_FIRST * top)
    trials: dict[int, list[Trial]] = {}
    others: dict[int, list[Trial]] = {}
    found: dict[tuple[int, Configuration], Trial] = {}
    last: list[Trial] = []
    with ThreadPoolExecutor(usable_cores()) as pool, _bar(progress) as bar:
        runner = _Runner(bench, time_steps, pool, bar)

        def add(new: list[Trial]) -> None:
            runner.add(new)
            if not last and any(map(_is_grid, new)) and (launched := without_waiting()):
                last.append(Trial(launched[0], new[0].batch, launched[1]))
                runner.add(last)

        for batch in batches:
            ranked = [Trial(configuration, batch, predicted) for configuration, predicted in candidates(batch)]
            trials[batch], others[batch] = ranked[:first], ranked[first:]
            add(trials[batch])
        while done := runner.some():
            found |= {(trial.batch, trial.configuration): trial for trial in done}
            for batch in {trial.batch for trial in done}:
                known = [key for trial in trials[batch] if (key := (batch, trial.configuration)) in found]
                if len(known) == first:
                    more = _next([found[key] for key in known], others[batch])[: count - first]
                    trials[batch] += more
                    add(more)
    in_order = [trial for batch in batches for trial in trials[batch]] + last
    return [found[trial.batch, trial.configuration] for trial in in_order]


def _next(measured: Sequence[Trial], others: Sequence[Trial]) -> list[Trial]:
    """`others`, ranked, those first that are of the kind of the fastest: the model errs more between kinds than
    within one."""
    kind = min(measured, key=lambda trial: trial.measured).configuration.kind
    return sorted(others, key=lambda trial: trial.configuration.kind != kind)


def _bar(progress: bool) -> tqdm[NoReturn]:
    return tqdm(desc="tuning kernels", unit="kernel", total=0, leave=False, disable=not progress)


class _Runner:
    """Compiles in as many processes as there are cores for this one, each kernel once; runs one at a time on the
    device."""

    def __init__(self, bench: Bench, time_steps: int, pool: ThreadPoolExecutor, bar: tqdm[NoReturn]) -> None:
        self._bench, self._time_steps = bench, time_steps
        self._pool, self._bar = pool, bar
        self._compiling: dict[Configuration, Future[None]] = {}
        self._waiting: list[Trial] = []

    def add(self, trials: Sequence[Trial]) -> None:
        """Begin to compile."""
        self._waiting += trials
        self._bar.total += len(trials)
        new = [trial.configuration for trial in trials if trial.configuration not in self._compiling]
        shares = min(usable_cores(), len(new))
        for share in (new[first::shares] for first in range(shares)):
            self._compiling |= dict.fromkeys(share, self._pool.submit(self._bench.compile, share))

    def some(self) -> list[Trial]:
        """Some of what was added, each with what was measured; nothing if nothing is left."""
        self._bar.refresh()
        futures = {self._compiling[trial.configuration] for trial in self._waiting}
        compiled = wait(futures, return_when=FIRST_COMPLETED).done if futures else set()
        for future in compiled:
            future.result()
        ready = [trial for trial in self._waiting if self._compiling[trial.configuration] in compiled]
        self._waiting = [trial for trial in self._waiting if trial not in ready]
        measured = []
        for trial in ready:
            measured.append(timed(self._bench, trial, self._time_steps))
            self._bar.update()
        return measured


def timed(bench: Bench, trial: Trial, time_steps: int) -> Trial:
    """`trial` with what was measured, or with what went wrong."""
    try:
        measured = bench.measure(trial.configuration, trial.batch, time_steps)
    except KernelError as error:
        return replace(trial, measured=NEVER, error=str(error))
    return replace(trial, measured=measured.nanoseconds, registers=measured.registers, local=measured.local)


def _chosen(trials: Sequence[Trial], batches: Sequence[int]) -> list[Trial]:
    """The fastest for each batch size; where two sizes in a row agree, the larger stands for both."""
    chosen: list[Trial] = []
    for batch in batches:
        of_batch = [trial for trial in trials if trial.batch == batch]
        if not of_batch:
            raise KernelError(f"no configuration fits the device with a batch of {batch}")
        best = min(of_batch, key=lambda trial: trial.measured)
        if best.measured == NEVER:
            raise KernelError(f"none of {len(of_batch)} kernels runs with a batch of {batch}: {best.error}")
        if chosen and chosen[-1].configuration == best.configuration:
            chosen.pop()
        chosen.append(best)
    return chosen
