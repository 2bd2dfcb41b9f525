"""What the steps of one optimised object are told: the user's options, resolved once for the device that they meet."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from graph_passes.analysis.memory.timeline import COUNTED
from graph_passes.decision import Decision
from graph_passes.pipeline import Phase, runs
from graph_passes.report import Report
from tfmem.devices import Target
from tfmem.options import Options, PassName, default_passes, parse_budget

SURELY_FITS = 0.75  # of the budget: a step estimated at less is not observed


@dataclass(frozen=True, eq=False, kw_only=True)
class Settings:
    """Options with the device they meet.

    Attributes:
        options: the user's.
        target: the device whose memory is planned.
        counts: whether the device's allocator counts bytes; TensorFlow's plain CPU allocator (oneDNN off) does not.
        limit: bytes that a step may use where the user gives no budget; None for no limit.
        called: whether what is optimised is called by this process, again and again.
        left_out: passes that do not run, whatever the options say.
        label: what users call the object, for the progress line; "" for the function's name.
        surely_fits: the share of the budget up to which an estimate is trusted.
        passes: those that run: the user's, or the default ones.
        budget: bytes; None for no limit.
        must_fit: whether the user gave the budget; else it is the device's memory, and planning for it is best effort.
    """

    options: Options
    target: Target
    counts: bool = True
    limit: int | None = None
    called: bool = False
    left_out: Collection[str] = ()
    label: str = ""
    surely_fits: float = SURELY_FITS
    passes: tuple[PassName, ...] = field(init=False)
    budget: int | None = field(init=False)
    must_fit: bool = field(init=False)

    def __post_init__(self) -> None:
        given = self.options.passes
        if given is None:
            given = default_passes(self.options, timed=self.called and self.target.is_gpu)
        passes = tuple(name for name in given if name not in self.left_out)
        wanted = parse_budget(self.options.memory_budget, self.target.memory)
        budget = self.limit if wanted is None else wanted
        if not runs(Phase.UNDER_BUDGET, passes):
            budget = None
        resolved = {"passes": passes, "budget": budget, "must_fit": budget is not None and wanted is not None}
        for name, value in resolved.items():
            object.__setattr__(self, name, value)

    @property
    def observes(self) -> bool:
        """Whether steps are observed: the user lets it, and the device's allocator counts bytes."""
        return self.options.observe and self.counts

    @property
    def merges(self) -> bool:
        """Whether TensorFlow's oneDNN pass merges ops once all other passes have run. Where it does, the allocator is
        oneDNN's, too, which counts."""
        return not self.target.is_gpu and self.counts

    @property
    def counted(self) -> int:
        """Bytes of the smallest buffer that the device's allocator counts, in whole chunks; see `Timeline.counted`.

        0 on a GPU, whose chunks are replayed, and where nothing is counted.
        """
        return COUNTED if self.merges else 0

    @property
    def replaces(self) -> bool:
        """Whether recurrent layers are to be replaced."""
        return runs(Phase.BEFORE_GRAPPLER, self.passes)

    @property
    def stitches(self) -> bool:
        """Whether regions of ops are to be stitched."""
        return runs(Phase.AFTER_GRAPPLER, self.passes)

    @property
    def rewrites(self) -> bool:
        """Whether anything is to be done to a step that no budget limits."""
        return self.replaces or self.stitches

    @property
    def feed_shapes(self) -> dict[str, tuple[int, ...]]:
        """The user's input shapes, by tensor name."""
        return {f"{name}:0": shape for name, shape in self.options.input_shapes.items()}

    def unobserved(self) -> Self:
        """The settings of steps that run on their own, where no later call can bring a better plan."""
        return replace(self, options=replace(self.options, observe=False))

    def shaped(self, shapes: Mapping[str, tuple[int, ...]]) -> Self:
        """The settings of steps whose inputs have these shapes, by name."""
        return replace(self, options=replace(self.options, input_shapes={**self.options.input_shapes, **shapes}))

    def unlimited(self, graph: str) -> Report:
        """The report of a step that nothing limits."""
        return Report(
            graph=graph,
            device=self.target.description,
            policy=self.options.offload.policy,
            decision=Decision.NO_BUDGET,
            peak_before=0,
            peak_predicted=0,
            passes=self.passes,
        )
