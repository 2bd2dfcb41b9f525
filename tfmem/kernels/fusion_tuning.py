"""Kernels of a plan that runs, timed one after the other: those first that take the most of a step.

plan by model --compile--> it runs          `FusionKernels.programs`
  --the kernels' shares of a step--> the largest first, nothing under 1%
  --the best ranked of each, timed--> what they save together, and the programs      `FusionKernels.tuned`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.framework.graph_pb2 import GraphDef

from custom_ops import image_functions
from custom_ops.background import go_on
from custom_ops.errors import KernelError
from custom_ops.expr.program import Program
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.fusion.programs import FusionProgram, Shapes, build, by_cache, fastest_trial, timed, typical
from custom_ops.fusion.region import Kernel, Region, Shape
from custom_ops.fusion.search.ranking import Ranking
from custom_ops.jit.cache import Cache
from custom_ops.jit.compilers import Compilers
from custom_ops.jit.device import DeviceContext, Quiet
from graph_passes.graph import serde
from graph_passes.graph.ir import Code
from graph_passes.graph.ops import FUSION_OP
from graph_passes.passes.fuse.plan import FusionPlan
from tfmem.capture.captured import Captured, every_node
from tfmem.devices import Target
from tfmem.kernels.fusion_programs import TIMED, Programs, gpu_programs, ranking_of
from tfmem.kernels.recurrent import kernel_folder
from tfmem.options import Options

LEAST = 0.01  # of what all kernels of a step take, by model: kernels that take less are not timed


@dataclass(frozen=True)
class Tuned:
    """What timing found.

    Attributes:
        programs: of regions, by their text.
        saved: seconds of a step, against the kernels that the model chose.
        timed: kernels.
    """

    programs: Mapping[str, tuple[FusionProgram, ...]]
    saved: float
    timed: int


@dataclass(frozen=True)
class FusionKernels:
    """Makes the kernels of one step's regions: first as the model chooses, then as times do.

    Attributes:
        target: the device.
        options: how many are timed, and where times are kept.
        quiet: keeps steps from running while a kernel is timed.
        compilers: other processes, which compile and rank.
        ranking: what they ranked.
    """

    target: Target
    options: Options
    quiet: Quiet | None = None
    compilers: Compilers = field(default_factory=Compilers)
    ranking: Ranking = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranking", ranking_of(self.compilers))

    def begin(self) -> None:
        """Make compilers ready while Grappler runs and regions are planned."""
        self.compilers.begin()

    @property
    def programs(self) -> Programs:
        """What makes a region's kernels without timing any; see `gpu_programs`."""
        return gpu_programs(self.target, self.options, self.compilers, self.quiet, self.ranking, untimed=True)

    def tuned(self, plan: FusionPlan) -> Tuned:
        """Times the kernels of a plan.

        Raises:
            KernelError: there is no device, or a region's kernels cannot be made.
        """
        regions = {region.text: region.lowered.region for region in plan.regions if region.programs}
        top = TIMED[self.options.fusion.tune]
        with (
            DeviceContext(self.target.ordinal, compile_source=self.compilers, quiet=self.quiet) as device,
            kernel_folder(self.options.cache_directory) as folder,
        ):
            cache, saved, count = Cache(folder), 0.0, 0
            trials_of = timed(device, cache, top, self.ranking)
            for (pattern, shapes), times in self._by_share(regions.values(), device.processors):
                go_on()
                with suppress(KernelError):  # no kernel of those that are timed runs: the model's stays
                    trials = trials_of(pattern, shapes)
                    saved += times * max(0.0, trials[0].measured - fastest_trial(trials).measured)
                    count += 1
            choose = by_cache(device, cache, top, self.ranking)
            made = {
                text: tuple(build(each, device.arch, choose, cache, self.compilers)) for text, each in regions.items()
            }
        return Tuned(made, saved * 1e-9 if saved < float("inf") else 0.0, count)

    def _by_share(self, regions: Iterable[Region], processors: int) -> list[tuple[tuple[Pattern, Shapes], int]]:
        """Patterns with how often a step runs them, those first that take the most of it, by model."""
        counts: dict[tuple[Program, tuple[Shape, ...]], int] = {}
        for region in regions:
            for step in region.steps:
                if isinstance(step, Kernel):
                    key = step.program, tuple(region.values[value].shape for value in step.inputs)
                    counts[key] = counts.get(key, 0) + 1
        found = []
        for (program, shapes), times in counts.items():
            pattern, known = Pattern.of(program, shapes), typical(shapes)
            ranked = self.ranking(pattern, known, processors)
            if ranked:
                found.append((times * ranked[0][1], (pattern, known), times))
        found.sort(key=lambda each: -each[0])
        total = sum(share for share, _, _ in found)
        return [(what, times) for share, what, times in found if share >= LEAST * total]


def with_programs(captured: Captured, programs: Mapping[str, Sequence[FusionProgram]]) -> Captured:
    """A stitched graph with other kernels of its regions, which their text tells. The code of kernels that no op names
    any more is left out, so that the graph is the one that is planned with these kernels from the start."""
    graph_def = GraphDef()
    graph_def.CopyFrom(captured.graph_def)
    codes: dict[str, bytes] = {}
    for node in every_node(graph_def):
        text = node.attr["region"].s.decode() if node.op == FUSION_OP else ""
        if text not in programs:
            continue
        made = programs[text]
        node.attr["programs"].CopyFrom(serde.encode(tuple(program.to_text() for program in made)))
        node.attr["images"].CopyFrom(serde.encode(tuple(Code(program.image.code) for program in made)))
        codes |= {image_functions.name_of(program.image.code): program.image.code for program in made}
    named = {
        found.name for node in every_node(graph_def) if "images" in node.attr for found in node.attr["images"].list.func
    }
    kept = [each for each in graph_def.library.function if not _is_image(each) or each.signature.name in named]
    present = {function.signature.name for function in kept}
    new = [image_functions.definition(code) for name, code in codes.items() if name not in present]
    del graph_def.library.function[:]
    graph_def.library.function.extend([*kept, *new])
    return replace(captured, graph_def=graph_def)


def _is_image(function: FunctionDef) -> bool:
    return function.signature.name.startswith(image_functions.PREFIX)
