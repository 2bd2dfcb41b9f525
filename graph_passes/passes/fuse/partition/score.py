"""What a kernel takes and what it saves: FusionStitching's score (arXiv 1911.11576, section 4.3).

    score(P) = sum of K(op) + (N - 1) * launch - K(P)

where K is the time of a kernel, of one op or of all of the pattern P, and N the number of ops that would be kernels by
themselves. By model, K is the time that copying takes of as many bytes as the kernel moves (Figure 4), plus what it
takes where the kernel has a barrier of the grid. What a model cannot predict is measured, where that is possible:
patterns with products, and those that mix row reductions and other reductions (score by execution).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from custom_ops.background import go_on
from graph_passes.analysis.cost.kernel_costs import KernelDevice
from graph_passes.analysis.dependences import connected
from graph_passes.analysis.op_pattern import REDUCTIONS, OpPattern
from graph_passes.passes.fuse.partition.candidate import WHOLE, RegionCandidate
from graph_passes.refusals import Refusal


@dataclass(frozen=True)
class Measure:
    """Times of kernels, one after the other in a graph of launches, so that a launch is in them; None: not measured.

    Attributes:
        kernel: seconds of one kernel of these nodes.
        call: seconds of a product by the library.
        prepare: does what can be done for several patterns at once; all of them are asked about next.
    """

    kernel: Callable[[Sequence[str]], float | None]
    call: Callable[[str], float | None]
    prepare: Callable[[Sequence[Sequence[str]]], None] = lambda patterns: None


NUMBER = 8  # bytes of one
OF_OP, OF_RESULT = 90, 350  # characters of a kernel's source, fitted to those of a dozen networks
AGAIN = 0.05  # of a product's time for an op on its operands, which is computed again for each tile: an estimate

# Why these nodes cannot be one kernel; None if they can.
Refuse = Callable[[Sequence[str]], Refusal | None]


@dataclass(frozen=True)
class Candidate:
    """A pattern that may become a kernel.

    Attributes:
        members: its nodes, in increasing order.
        score: seconds that it saves.
        seconds: that it takes.
        ideal: what it would save at most, if it had to wait nowhere.
    """

    members: tuple[int, ...]
    score: float
    seconds: float = 0.0
    ideal: float = 0.0


@dataclass
class Scorer:
    """Gives patterns of one region their scores, each once.

    Attributes:
        region: the region.
        device: what runs it.
        refuse: see `Refuse`; asked about every pattern that would gain anything.
        measure: see `Measure`; without one, all is by model.
    """

    region: RegionCandidate
    device: KernelDevice
    refuse: Refuse | None = None
    measure: Measure | None = None
    refused: dict[tuple[int, ...], Refusal] = field(default_factory=dict)
    _known: dict[tuple[int, ...], Candidate | None] = field(default_factory=dict)
    _scores: dict[tuple[int, ...], float] = field(default_factory=dict)
    _alone: dict[int, float] = field(default_factory=dict)

    def candidate(self, members: Iterable[int]) -> Candidate | None:
        """The pattern, or None if it gains nothing or can be no kernel."""
        pattern = tuple(sorted(members))
        if pattern not in self._known:
            go_on()
            self._known[pattern] = self._scored(pattern)
        return self._known[pattern]

    def score(self, pattern: tuple[int, ...]) -> float:
        """What a pattern would save by model, whether or not it can be a kernel; 0 if nothing."""
        if pattern not in self._scores:
            go_on()
            working = [number for number in pattern if self.region.works(number)]
            saved = sum(map(self._one, working)) + (len(working) - 1) * self.device.launch
            self._scores[pattern] = max(saved - self.seconds(pattern), 0.0) if len(working) > 1 else 0.0
        return self._scores[pattern]

    def seconds(self, members: Sequence[int]) -> float:
        """What one kernel of these nodes takes, by model."""
        return self._seconds(members, *self._moved(members)[::2])

    def _seconds(self, members: Sequence[int], moved: float, passes: int) -> float:
        waited = (passes - 1) * self._barrier(members) + self._product(members)
        return self.device.seconds(moved) + waited + self._unlike(members, moved)

    def _scored(self, pattern: tuple[int, ...]) -> Candidate | None:
        working = [number for number in pattern if self.region.works(number)]
        products = any(number in self.region.generated for number in working)
        if (len(working) < 2 and not products) or self.too_long(pattern):
            return None
        saved = sum(map(self._one, working)) + (len(working) - 1) * self.device.launch
        moved, least, passes = self._moved(pattern)
        seconds = self._seconds(pattern, moved, passes)
        ideal = saved - self.device.seconds(least) - self._product(pattern)
        if ideal <= 0.0 and not (products and self.measure):
            return None
        names = [self.region.names[number] for number in pattern]
        why = self.refuse(names) if self.refuse else None
        if why:
            self.refused[pattern] = why
            return None
        if self.measure and products:
            gain = self._gain(pattern)
            if gain is not None:
                saved, ideal = seconds + gain, gain
        elif self.measure and mixed([self.region.kinds[number] for number in pattern]):
            wanted = (names, *([self.region.names[number]] for number in working))
            self.measure.prepare(wanted)
            measured = [self.measure.kernel(members) for members in wanted]
            known = [seconds for seconds in measured if seconds is not None]
            if len(known) == len(measured):
                seconds, saved = known[0], sum(known[1:])
                ideal = saved - seconds
        return Candidate(pattern, saved - seconds, seconds, ideal) if saved > seconds else None

    def too_long(self, pattern: Sequence[int]) -> bool:
        """Whether a kernel's source would be longer than it should be, and its parts could be several kernels."""
        most, working = self.device.source, [number for number in pattern if self.region.works(number)]
        if not most or len(working) * (OF_OP + OF_RESULT) <= most:
            return False
        within = set(pattern)
        results = sum(self._leaves(memory, within) for number in working for memory in self.region.defs[number])
        long = len(working) * OF_OP + results * OF_RESULT > most
        return long and len(self.loose(pattern)) > 1

    def loose(self, members: Sequence[int]) -> list[list[int]]:
        """The parts of a pattern between which nothing passes but numbers that are computed first, such as an
        optimizer's learning rate; these numbers come first."""
        region, within, first = self.region, set(members), set[int]()
        for number in members:
            small = all(region.nbytes[memory] <= NUMBER for memory in (*region.uses[number], *region.defs[number]))
            if small and all(p in first for p in region.net.before[number] if p in within):
                first.add(number)
        others = [number for number in members if number not in first]
        return [*([sorted(first)] if first else []), *connected(region.net, others)]

    def _unlike(self, members: Sequence[int], moved: float) -> float:
        """What parts with no dependences among them lose in a kernel of several passes: each waits for the slowest in
        all of them, and all share registers and the size of CTAs. To put together the parts of what is reduced over all
        of a tensor is a pass, too."""
        region, device = self.region, self.device
        several = any(region.whole[number] for number in members)  # a pass ends behind no other member
        if not device.packed or not several or moved <= device.block:
            return 0.0
        parts = connected(region.net, members)
        if len(parts) == 1:
            return 0.0
        touched = (
            {memory for number in part for memory in (*region.uses[number], *region.defs[number])} for part in parts
        )
        times = [device.seconds(sum(region.nbytes[memory] for memory in each)) - device.seconds(0) for each in touched]
        return device.packed * (sum(times) - max(times))

    def _product(self, members: Sequence[int]) -> float:
        """What products take in a kernel beside the bytes that it moves; each tile recomputes its operands."""
        if not any(number in self.region.generated for number in members):
            return 0.0
        before, _ = self._sides(members)
        return self.device.product * (1 + AGAIN * sum(map(self.region.works, before)))

    def dry_run(self) -> tuple[Scorer, list[Sequence[str]]]:
        """A scorer by model alone, and the list in which it notes what would be measured of patterns without
        products."""
        noted: list[Sequence[str]] = []

        def nothing(_: object) -> None:
            return None

        return replace(self, measure=Measure(nothing, nothing, noted.extend), refused={}, _known={}), noted

    def prepare(self, patterns: Iterable[Iterable[int]]) -> None:
        """Get ready to measure mixed patterns, and what they are measured against."""
        if self.measure:
            found = [tuple(sorted(members)) for members in patterns]
            parts = [part for pattern in found for part in self._parts(pattern)]
            names = [[self.region.names[number] for number in members] for members in dict.fromkeys([*found, *parts])]
            self.measure.prepare([members for members in names if not self.refuse or not self.refuse(members)])

    def _gain(self, pattern: tuple[int, ...]) -> float | None:
        """What a pattern with products saves: the library's products, with kernels of what is before them and of what
        is behind, less its own time; and what such kernels save by themselves, by the same model as all others."""
        assert self.measure is not None
        names, parts = self.region.names, self._parts(pattern)
        times = [self.measure.call(names[number]) for number in pattern if number in self.region.generated]
        times += [self.measure.kernel([names[number] for number in part]) for part in parts]
        own = self.measure.kernel([names[number] for number in pattern])
        if own is None or any(seconds is None for seconds in times):
            return None
        return sum(seconds for seconds in times if seconds is not None) - own + sum(map(self.score, parts))

    def _parts(self, pattern: tuple[int, ...]) -> list[tuple[int, ...]]:
        """What of a pattern comes before its products, and behind them, where that is any work."""
        return [part for part in self._sides(pattern) if any(map(self.region.works, part))]

    def _sides(self, pattern: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The members that wait for no product of a pattern, and those that do."""
        behind = {number for number in pattern if number in self.region.generated}
        for number in pattern:
            if any(other in behind for other in self.region.net.before[number]):
                behind.add(number)
        return (
            tuple(number for number in pattern if number not in behind),
            tuple(number for number in pattern if number in behind and number not in self.region.generated),
        )

    def _one(self, number: int) -> float:
        if number not in self._alone:
            self._alone[number] = self.seconds((number,))
        return self._alone[number]

    def _barrier(self, members: Iterable[int]) -> float:
        region = self.region
        touched = {memory for number in members for memory in (*region.uses[number], *region.defs[number])}
        large = max((region.nbytes[memory] for memory in touched), default=0) > self.device.block
        return self.device.barrier if large else 0.0

    def _moved(self, members: Sequence[int]) -> tuple[int, int, int]:
        """Bytes that a kernel moves, bytes that it has to move at least, and how many passes it takes.

        A pass ends where a member needs all of what another one reduces. What is read in several passes, or made in one
        and read in another, is moved again, unless the chip can hold it.
        """
        region, within = self.region, set(members)
        passes: dict[int, int] = {}
        for number in members:
            passes[number] = max(
                (passes[p] + region.whole[p] for p in region.net.before[number] if p in within), default=0
            )
        made = {memory: number for number in reversed(members) for memory in region.defs[number]}
        read: dict[int, list[int]] = {}
        for number in members:
            for memory in region.uses[number]:
                read.setdefault(memory, []).append(number)
        moved = least = 0
        for memory, readers in read.items():
            size, where = region.nbytes[memory], {passes[number] for number in readers}
            if memory not in made or readers[0] <= made[memory]:  # the latter: what a variable held before
                least += size
                moved += size * (len(where) if size > self.device.chip else 1)
            elif size > self.device.chip:
                again = len(where - {passes[made[memory]]})
                moved += size * (again + (again > 0 and not self._leaves(memory, within)))
        for memory in made:
            if self._leaves(memory, within):
                least += region.nbytes[memory]
                moved += region.nbytes[memory]
        return moved, least, 1 + max(passes.values(), default=0)

    def _leaves(self, memory: int, within: set[int]) -> bool:
        return memory in self.region.live_outs or any(reader not in within for reader in self.region.readers[memory])


def mixed(kinds: Iterable[OpPattern]) -> bool:
    """Whether a pattern is one that a model says little about: products with reductions, or reductions of two kinds."""
    found = set(kinds)
    products = bool(found & {OpPattern.PRODUCT, OpPattern.BATCHED_PRODUCT})
    return (products and bool(found & REDUCTIONS)) or (OpPattern.ROW_REDUCTION in found and bool(found & WHOLE))
