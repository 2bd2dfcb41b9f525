"""What every step of one optimised object shares, and plans made without observing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import tensorflow as tf

from custom_ops.background import has_ended
from custom_ops.errors import TfmemError, warn
from custom_ops.load import Library
from graph_passes.analysis.cost.model import Roofline, held
from graph_passes.analysis.memory.calls import WithCalls
from graph_passes.analysis.memory.simulate import Link
from graph_passes.analysis.memory.timeline import COUNTED, Timeline
from graph_passes.decision import Decision, Missed
from graph_passes.errors import NoGradientError, ReplicasError, UnknownShapeError
from graph_passes.graph.ir import Graph, Node
from graph_passes.passes.offload.plan import OffloadPlan
from graph_passes.passes.recurrent.match import RecurrentPlan
from graph_passes.pipeline import Phase, runs
from graph_passes.report import Report, unenforced
from tfmem.devices import Target, memory
from tfmem.options import Options, PassName, default_passes, parse_budget, workspace_limits
from tfmem.runtime.alternation import Alternation
from tfmem.runtime.host_memory import require_room
from tfmem.runtime.measuring_lock import alone

NOT_PLANNABLE = (NoGradientError, ReplicasError, UnknownShapeError)  # graphs that the offload pass is not for


@dataclass(frozen=True, eq=False)
class Engine:
    """Options with the device they meet.

    Attributes:
        options: the user's.
        library: the op library.
        target: the device whose memory is planned.
        link: bandwidth between the device and where tensors go.
        asked: whether the user asked for the recurrent pass: then a recurrence that stays is worth a warning.
        called: whether what is optimised is called by this process, again and again.
        left_out: passes that do not run, whatever the options say.
        label: what users call the object, for the progress line; "" for the function's name.
        warned: the causes of which the user was warned, once for all steps of the object.
        alternation: of steps and of what is measured meanwhile.
    """

    options: Options
    library: Library
    target: Target
    link: Link
    asked: bool = False
    called: bool = False
    left_out: Collection[str] = ()
    label: str = ""
    warned: set[str] = field(default_factory=set)
    alternation: Alternation = field(default_factory=Alternation)

    def warn(self, cause: str, message: str) -> None:
        """Show a `TfmemWarning`, unless there was one of this cause, or the program has ended: then a thread in the
        background fails because it can start no others, which is nobody's fault."""
        if cause not in self.warned and not has_ended():
            self.warned.add(cause)
            warn(message)

    def warn_of_kept(self, name: str, replacements: RecurrentPlan) -> None:
        """Tell the user which recurrences stay as they were: because of a fault of tfmem's, or though asked for."""
        faults = [loop for loop in replacements.unmatched if loop.traceback]
        others = [loop for loop in replacements.unmatched if self.asked and not loop.traceback]
        for cause, kept in (("fault", faults), ("kept", others)):
            if kept:
                more = f"; and {len(kept) - 1} more" if len(kept) > 1 else ""
                what = f"{kept[0].name} ({kept[0].carrier}) stays as it is: {kept[0].reason}{more}"
                self.warn(cause, f"tfmem: {name}: {what}; see tfmem.report(...)")

    def warn_of_losses(self, report: Report) -> None:
        """Tell the user of a missed budget, of what it is not enforced for, and of XLA that is lost."""
        missed = [note for note in report.notes if isinstance(note, Missed)]
        if missed:
            self.warn("budget", f"tfmem: {report.graph}: {missed[0]}; see tfmem.report(...)")
        if report.not_enforced:
            self.warn("not enforced", f"tfmem: {report.graph}: {unenforced(report)}; see tfmem.report(...)")
        if report.xla_lost:
            self.warn("XLA", f"tfmem: {report.graph}: XLA is {report.jit_compile}; see tfmem.report(...)")

    def unobserved_notes(self, name: str, *, known: bool) -> list[str]:
        """What a report says of a step that is not observed; the user is told where he asked for it to be."""
        notes = [] if known else ["op times and memory are estimates: nothing was observed"]
        if self.options.observe:
            notes.append("nothing can be observed: the allocator keeps no statistics (oneDNN is off)")
            cure = "set TF_ENABLE_ONEDNN_OPTS=1 before TensorFlow is imported, or pass observe=False"
            self.warn("observe", f"tfmem: {name}: {notes[-1]}, so that the plan rests on estimates; {cure}")
        return notes

    @property
    def passes(self) -> tuple[PassName, ...]:
        """Those that run: the user's, or the default ones."""
        given = self.options.passes
        if given is None:
            given = default_passes(self.options, timed=self.called and self.target.is_gpu)
        return tuple(name for name in given if name not in self.left_out)

    @property
    def budget(self) -> int | None:
        """Bytes; None for no limit.

        Raises:
            InvalidBudgetError: the budget is none for this device.
        """
        budget = parse_budget(self.options.memory_budget, self.target.memory)
        if not runs(Phase.UNDER_BUDGET, self.passes):
            return None
        return self.target.memory if budget is None and self.target.is_gpu else budget

    @property
    def must_fit(self) -> bool:
        """Whether the user gave the budget; else it is the device's memory, and planning for it a courtesy."""
        return self.budget is not None and self.options.memory_budget is not None

    @property
    def observes(self) -> bool:
        """Whether steps are observed: the user lets it, and the device's allocator counts bytes.

        TensorFlow's plain CPU allocator (oneDNN off) does not.
        """
        return self.options.observe and self._counts

    @property
    def counted(self) -> int:
        """Bytes of the smallest buffer that the device's allocator counts, in whole chunks; see `Timeline.counted`.

        0 on a GPU, whose chunks are replayed, and where nothing is counted.
        """
        return COUNTED if self.merges else 0

    @property
    def merges(self) -> bool:
        """Whether TensorFlow's oneDNN pass merges ops once all other passes have run. Where it does, the allocator is
        oneDNN's, too, which counts."""
        return not self.target.is_gpu and self._counts

    @property
    def _counts(self) -> bool:
        return memory(self.library, self.target.name).bytes_in_use >= 0

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """No step of the object is called meanwhile, and the device has done what those before enqueued.

        That is waited for by way of a number that TensorFlow computes and brings back. To synchronize the context would
        end what another thread captures.
        """
        with self.alternation.measurement():
            with suppress(tf.errors.OpError), tf.init_scope(), tf.device(self.target.name):
                (tf.zeros([]) + 1.0).numpy()
            yield

    def unobserved(self) -> Engine:
        """The same for steps that run on their own, where no later call can bring a better plan."""
        return replace(self, options=replace(self.options, observe=False))

    def shaped(self, shapes: Mapping[str, tuple[int, ...]]) -> Engine:
        """The same for steps whose inputs have these shapes, by name."""
        return replace(self, options=replace(self.options, input_shapes={**self.options.input_shapes, **shapes}))

    def estimate(self, workspace: bool) -> Estimate:
        """Costs before anything ran.

        Args:
            workspace: whether convolutions are charged with what cuDNN may take.
        """
        limits = workspace_limits() if workspace and self.target.is_gpu else (0, 0)
        return Estimate(Roofline(self.target.profile, limits, self.target.is_gpu), self.in_use)

    @property
    def spill_key(self) -> str:
        """What stands for the directory of spill files in graphs."""
        return self.library.spill_key(self.options.offload.spill_directory)

    @property
    def in_use(self) -> int:
        """Bytes of the device's memory that are taken now; 0 where its allocator does not count."""
        return self._in_use()[0]

    @property
    def free_memory(self) -> int:
        """Bytes of the device's memory that nobody uses by now: of a CPU, within the control group."""
        if not self.target.is_gpu:
            return self.library.host_memory().available
        found = memory(self.library, self.target.name)
        return found.bytes_limit - found.bytes_in_use

    @property
    def in_use_alone(self) -> int | None:
        """The same; None if a step that is measured ran meanwhile: what it takes would be counted."""
        size, known = self._in_use()
        return size if known else None

    def _in_use(self) -> tuple[int, bool]:
        with alone(reads=True) as turn:
            return max(0, memory(self.library, self.target.name).bytes_in_use), turn.alone

    def require_host_room(self, timeline: Timeline, plan: OffloadPlan) -> None:
        """Raise if the host cannot take what `plan` moves; see `tfmem.runtime.host_memory`."""
        moved = sum(timeline.buffers[move.buffer].nbytes for move in plan.moves)
        require_room(moved, self.options.offload, self.target.is_gpu, self.library)

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

    def left_alone(self, report: Report, error: TfmemError, replaced: bool) -> Report:
        """`report` of a step whose memory cannot be planned, saying why.

        Args:
            report: of the step without a budget.
            error: one of `NOT_PLANNABLE`, as it was caught; raised again if the user gave a budget.
            replaced: whether recurrent layers were; else nothing was done to the step, which is worth a warning.
        """
        if self.must_fit:
            raise error
        if not replaced:
            self.warn("not planned", f"tfmem: {report.graph} is left as it was, its memory was not planned: {error}")
        return replace(report, notes=(*report.notes, f"memory was not planned: {error}"))


@dataclass(frozen=True)
class Estimate:
    """A roofline, and what the allocator holds already; a `CostModel`."""

    roofline: Roofline
    in_use: int

    def seconds(self, graph: Graph, node: Node) -> float:
        """See `CostModel`."""
        return self.roofline.seconds(graph, node)

    def workspace(self, graph: Graph, node: Node) -> int:
        """See `CostModel`."""
        return WithCalls(self.roofline).workspace(graph, node)

    def base(self, graph: Graph) -> int:
        """See `CostModel`: variables exist already, or will."""
        small = 0 if self.roofline.is_gpu else held(graph, COUNTED)  # the allocator does not count these
        return max(self.roofline.base(graph), self.in_use + small)
