"""Chooses the configurations of a recurrent kernel by running them: the best ranked of each batch size are compiled and
timed on the device, and the fastest is kept (GRNN, section 7.2). Choices are cached under all that they depend on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from os import cpu_count
from typing import Protocol

from tqdm import tqdm

from custom_ops.errors import KernelError
from custom_ops.jit.cache import Cache, digest
from custom_ops.jit.program import ANY_BATCH, Program
from custom_ops.spec import Configuration, RecurrentSpec

FORMAT = "tuned 1"
BATCHES = (1, 8, 64)
TIME_STEPS = 100
NEVER = float("inf")

Candidates = Callable[[int], Sequence[tuple[Configuration, float]]]  # batch -> (configuration, nanoseconds), best first


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
        programs: ascending by `max_batch`; the last takes any.
        chosen: the trial behind each program.
        trials: all of them, in the order of their ranks, batch by batch.
    """

    programs: tuple[Program, ...]
    chosen: tuple[Trial, ...]
    trials: tuple[Trial, ...]

    def blobs(self) -> list[bytes]:
        """The programs as the op's attribute takes them."""
        return [program.to_bytes() for program in self.programs]


class Bench(Protocol):
    """Where kernels of one specification are built and timed; `custom_ops.jit.bench.DeviceBench` is the real one."""

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
) -> TunedRecurrent:
    """Compile, time and choose, or read the choice made before.

    Args:
        bench: of the specification, on the device.
        candidates: configurations for a batch size with their predicted nanoseconds, the best first.
        cache: of choices.
        batches: sizes to choose for. Each choice holds down to the size before it, the last for everything above.
        time_steps: length of the sweeps that are timed.
        top: how many of the best ranked are timed; None for all of them.
        progress: whether to show a bar.

    Raises:
        KernelError: no configuration fits the device, or none of them compiles and runs.
    """
    batches = sorted(set(batches))

    def made() -> bytes:
        trials = _timed(bench, candidates, batches, time_steps, top, progress)
        _chosen(trials, batches)  # before it is kept: a failure may be another program's on the device
        return json.dumps([asdict(trial) for trial in trials]).encode()

    key = digest(FORMAT, bench.identity, str(batches), str(time_steps), str(top))
    trials = [
        Trial(**{**values, "configuration": Configuration(**values["configuration"])})
        for values in json.loads(cache.get(key, made))
    ]
    chosen = _chosen(trials, batches)
    limits = [*(trial.batch for trial in chosen[:-1]), ANY_BATCH]
    programs = [bench.build(trial.configuration, limit) for trial, limit in zip(chosen, limits, strict=True)]
    return TunedRecurrent(tuple(programs), tuple(chosen), tuple(trials))


def _timed(
    bench: Bench, candidates: Candidates, batches: Sequence[int], time_steps: int, top: int | None, progress: bool
) -> list[Trial]:
    """All trials, run: compilation in as many processes as there are cores, one kernel at a time on the device.

    To list and rank what there is for a batch takes a while: what is compiled for others is compiled meanwhile."""
    workers = max(1, cpu_count() or 1)
    ranked: list[Trial] = []
    known: set[Configuration] = set()
    compiled: dict[Future[None], list[Configuration]] = {}
    found: dict[int, Trial] = {}
    with (
        ThreadPoolExecutor(workers) as pool,
        tqdm(desc="tuning kernels", unit="kernel", leave=False, disable=not progress) as bar,
    ):
        for batch in batches:
            found_here = candidates(batch)[:top]
            ranked += [Trial(configuration, batch, nanoseconds) for configuration, nanoseconds in found_here]
            new = [each for each in dict.fromkeys(each for each, _ in found_here) if each not in known]
            known.update(new)
            shares = min(workers, len(new))
            for share in (new[first::shares] for first in range(shares)):
                compiled[pool.submit(bench.compile, share)] = share
        bar.reset(total=len(ranked))
        for future in as_completed(compiled):
            future.result()
            for place, trial in enumerate(ranked):
                if trial.configuration in compiled[future]:
                    found[place] = _run(bench, trial, time_steps)
                    bar.update()
    return [found[place] for place in range(len(ranked))]


def _run(bench: Bench, trial: Trial, time_steps: int) -> Trial:
    """`trial` with what was measured, or with what went wrong."""
    try:
        measured = bench.measure(trial.configuration, trial.batch, time_steps)
    except KernelError as error:
        return replace(trial, error=str(error))
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
