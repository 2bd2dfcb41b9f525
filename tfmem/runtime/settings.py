"""The user's options for one optimised object, resolved once for its device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Self

from graph_passes.analysis.memory.timeline import COUNTED
from graph_passes.decision import Decision
from graph_passes.pipeline import PassPhase, runs
from graph_passes.plan_file import Plan
from graph_passes.report import Report
from tfmem.budgets import DeviceBudgets, budget_of
from tfmem.devices import Target, is_deterministic
from tfmem.options import Options, PassName, passes_of

SURELY_FITS = 0.75  # of the budget: a step estimated at less is not observed


@dataclass(frozen=True, eq=False, kw_only=True)
class Settings:
    """Options with the device they meet.

    Attributes:
        options: the user's.
        target: the device whose memory is planned.
        passes: those that run: the user's, or the default ones.
        budget: bytes; None for no limit.
        must_fit: whether the user gave the budget; else it is the device's memory, and planning for it is best effort.
        counts: whether the device's allocator counts bytes; TensorFlow's plain CPU allocator (oneDNN off) does not.
        called: whether this process calls the optimised object repeatedly.
        label: what users call the step, "resnet50.fit"; "" for the function's name.
        plan: a plan that steps are to run by; None if tfmem makes one.
        surely_fits: the share of the budget up to which an estimate is trusted.
        tried: whether ops are stitched although the user did not ask for it: on a CPU, where that is timed.
    """

    options: Options
    target: Target
    passes: tuple[PassName, ...]
    budget: int | None
    must_fit: bool
    counts: bool = True
    called: bool = False
    label: str = ""
    plan: Plan | None = None
    surely_fits: float = SURELY_FITS
    tried: bool = False

    @classmethod
    def of(cls, options: Options, target: Target, counts: bool = True, called: bool = False) -> Settings:
        """What `options` mean on a device; see the attributes.

        Raises:
            InvalidBudgetError: the budget is none for this device.
        """
        passes = passes_of(options, timed=called and target.is_gpu)
        budget, must_fit = budget_of(options, passes, target.plain_name, target.memory, target.is_gpu)
        return Settings(
            options=options,
            target=target,
            passes=passes,
            budget=budget,
            must_fit=must_fit,
            counts=counts,
            called=called,
        )

    def budget_on(self, device: Target) -> int | None:
        """Bytes that a step of several devices may use of one of them; None for no limit.

        One budget for each device is for devices of the kind of `target`: a GPU's is none for the CPU beside it.

        Raises:
            InvalidBudgetError: the budget is none for this device.
        """
        options = self.options
        if device.kind != self.target.kind and not isinstance(options.memory_budget, DeviceBudgets):
            options = replace(options, memory_budget=None)
        return budget_of(options, self.passes, device.plain_name, device.memory, device.is_gpu)[0]

    def require_used(self, devices: Collection[str] = ()) -> None:
        """Refuse budgets of devices that a step does not use.

        Args:
            devices: plain names of all devices that a step of several replicas uses; none for a step on `target` alone,
                of which the entries of other devices say nothing.

        Raises:
            InvalidBudgetError: a step of several replicas does not use a device that has an entry, or a step on one
                device has no entry, but others have.
        """
        budgets = self.options.memory_budget
        if "offload" not in self.passes or not isinstance(budgets, DeviceBudgets):
            return
        if devices or self.target.plain_name not in budgets.devices:
            budgets.require_used(devices or (self.target.plain_name,))

    @property
    def observes(self) -> bool:
        """Whether steps are observed: the user allows it, and the device's allocator counts bytes."""
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
        return runs(PassPhase.BEFORE_GRAPPLER, self.passes)

    @property
    def splits_if_faster(self) -> bool:
        """Whether a clock may decide that parts of a step run on pieces of the batch.

        A GPU's libraries choose algorithms by time, so numbers of two runs differ by rounding anyway. On a CPU they are
        equal, so there the user has to ask for it.
        """
        split = self.options.offload.split
        return split == "faster" or (split == "auto" and self.target.is_gpu)

    @property
    def splits_by_time(self) -> bool:
        """`splits_if_faster` of a step that is measured, and of which no number has to be equal in two runs."""
        return self.splits_if_faster and self.observes and self.plan is None and not is_deterministic()

    @property
    def stitches(self) -> bool:
        """Whether regions of ops are to be stitched."""
        return runs(PassPhase.AFTER_GRAPPLER, self.passes)

    @property
    def tries_fusion(self) -> bool:
        """Whether regions are to be stitched where that is timed to be faster: on a CPU, by default.

        The user named no passes and gave no budget, and this process calls the steps, so that they can be timed.
        """
        options = self.options
        timed = self.called and options.observe and options.fusion.tune != "off" and not options.fusion.architectures
        by_default = options.passes is None and self.replaces and not self.stitches
        return by_default and timed and not self.target.is_gpu and options.memory_budget is None

    @property
    def edits_bodies(self) -> bool:
        """Whether passes may edit functions that a graph calls."""
        return self.stitches or self.tries_fusion

    @property
    def rewrites(self) -> bool:
        """Whether anything is to be done to a step that no budget limits."""
        return self.replaces or self.stitches

    @property
    def feed_shapes(self) -> dict[str, tuple[int, ...]]:
        """The user's input shapes, by tensor name."""
        return {f"{name}:0": shape for name, shape in self.options.input_shapes.items()}

    def unobserved(self) -> Self:
        """The settings of steps that are not observed, so that no later call brings a better plan."""
        options = replace(self.options, observe=False)
        kept = passes_of(options, timed=self.called and self.target.is_gpu)
        return replace(self, options=options, passes=tuple(name for name in self.passes if name in kept))

    def unlimited(self) -> Self:
        """The settings of steps that no budget limits."""
        passes = tuple(name for name in self.passes if name != "offload")
        return replace(self, passes=passes, budget=None, must_fit=False, plan=None)

    def trying_fusion(self) -> Self:
        """The settings of a step that is stitched by default, where that is timed to be faster."""
        return replace(self, passes=("recurrent", "fusion", "offload"), tried=True)

    def shaped(self, shapes: Mapping[str, tuple[int, ...]]) -> Self:
        """The settings of steps whose inputs have these shapes, by name."""
        return replace(self, options=replace(self.options, input_shapes={**self.options.input_shapes, **shapes}))

    def unplanned(self, graph: str) -> Report:
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
