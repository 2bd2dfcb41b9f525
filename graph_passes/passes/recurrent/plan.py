"""Decides which recurrences of a graph are replaced. Pure: a `RecurrentPlan` comes out.

The hard case: steps that are written out, with their gradient, in a call that TensorFlow may choose or not.

    x --unstack--> x0 -> [cell] -> h0 -> [cell] -> h1 -> loss        one loop  [cell]* -> loss
                   x1 ------------------/                             is matched with one gradient loop;
    dx <--stack--- dx0 <- [dcell] <- dh0 <- [dcell] <- dh1 <-/         if either stays, so do all steps and the call

Matching the loops first and the steps later would miss the pair. So steps become loops in a copy (`roll_up`), all loops
are matched at once, and what did not match is left out of the next copy, until nothing more has to be left out:

    plan_recurrent      as captured: which calls come to the top level, which unrolled steps become loops; kernels
      roll_up           see find/roll.py
      plan_whole        of one graph: recurrences with their gradients, and those of inference
        plan_training   see train/plan_training.py
        plan_inference
      _Left.more        what has to be left out, so that the graph is read again

Kernels are made when nothing more has to be left; only if one cannot be made, of such a loop, is that repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from graph_passes.graph.graph_source import Readable
from graph_passes.graph.ir import Graph
from graph_passes.graph.rewrite import Names
from graph_passes.passes.recurrent.cleanup import with_fused_biases, without_zeros
from graph_passes.passes.recurrent.faults import attempt, attempted
from graph_passes.passes.recurrent.find.loops import functional_loops, loops_out_of_reach, lowered_loops
from graph_passes.passes.recurrent.find.repeated import Refused, repeated
from graph_passes.passes.recurrent.find.roll import roll_up
from graph_passes.passes.recurrent.find.step_gradients import Exits, RolledGradient
from graph_passes.passes.recurrent.lower.bidirectional import paired
from graph_passes.passes.recurrent.lower.cudnn import CUDNN, joinable_cudnn, match_cudnn
from graph_passes.passes.recurrent.lower.read_loop import read_loop
from graph_passes.passes.recurrent.lower.step_draws import unrolled
from graph_passes.passes.recurrent.match import Joinable, RecurrentPlan, Unmatched
from graph_passes.passes.recurrent.train.plan_training import Check, Gradients, Slow, plan_training
from graph_passes.refusals import Reason

EFFECTS = frozenset({"While", *CUDNN})  # carriers that have side effects


@dataclass(frozen=True)
class Needs:
    """What planning needs of TensorFlow and of a GPU, and what it may do.

    Attributes:
        gradients: see `train.plan.Gradients`.
        check: see `train.plan.Check`.
        tune: the plan with a kernel for each launch; matches for which there is none are among its `unmatched`.
        implementations: functions that may be brought to the top level, and the calls of each.
        in_place: whether the graph is edited in place, where no loop is made of unrolled steps.
        traced: whether it is a function's that is still being traced, so that what has side effects runs in any case.
        fuse_biases: whether products may add their biases, since no gradient will be taken.
        exits: see `find.step_gradients.Exits`; None: unrolled steps with their gradient stay.
        slow: see `train.plan.Slow`; None: nothing is.
        unrolls_draws: whether the device's kernel of `TfmemStepDraws` does not draw everything, as a GPU's.
    """

    gradients: Gradients
    check: Check
    tune: Callable[[RecurrentPlan], RecurrentPlan]
    implementations: Mapping[str, Sequence[str]] = field(default_factory=dict)
    in_place: bool = False
    traced: bool = False
    fuse_biases: bool = False
    exits: Exits | None = None
    slow: Slow | None = None
    unrolls_draws: bool = False


def plan_recurrent(source: Readable, needs: Needs) -> tuple[RecurrentPlan, Graph]:
    """What to replace, and the graph that the plan is for: the source's, or a `WorkingCopy` with loops in place of
    unrolled steps."""
    left = _Left({name: list(calls) for name, calls in needs.implementations.items()})
    while True:
        graph = source.read(left.chosen)
        keep = source.keep(graph)
        rolled = None if needs.in_place else roll_up(graph, keep, left.unrolled, needs.exits)
        loops = rolled.loops if rolled else {}
        graph = rolled.graph if rolled and rolled.graph else graph
        of_steps = rolled.gradients if rolled else ()
        plan = plan_whole(
            graph, keep, needs.gradients, needs.check, needs.traced, of_steps, needs.slow, needs.unrolls_draws
        )
        if left.more(plan, loops):
            continue
        plan = needs.tune(plan)
        if not left.more(plan, loops):
            break
    refused = [loop.name for loop in left.refused]
    # A call that was kept is reported once, with the reason found inside it.
    others = [loop for loop in plan.unmatched if not any(name.startswith(f"{loop.name}/") for name in refused)]
    unmatched = [*left.refused, *others, *(rolled.unmatched if rolled else ())]
    known = left.known | {name for match in plan.matches for name in match.removed}
    unmatched += _kept_steps(graph, keep, rolled.refused if rolled else (), known, needs.in_place)
    matches = attempted(unmatched, plan.matches, with_fused_biases) if needs.fuse_biases else plan.matches
    return replace(plan, matches=tuple(matches), unmatched=tuple(unmatched)), graph


@dataclass
class _Left:
    """What stays unchanged.

    Attributes:
        chosen: the implementations that do not.
        refused: loops inside of what does.
        unrolled: unrolled steps, by the name that their loop would have.
        known: the nodes of these.
    """

    chosen: dict[str, list[str]]
    refused: list[Unmatched] = field(default_factory=list)
    unrolled: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)

    def more(self, plan: RecurrentPlan, loops: Mapping[str, Collection[str]]) -> bool:
        """Add what `plan` could not match; whether there is anything, so that the graph has to be read again.

        Args:
            plan: made with what was left before.
            loops: the nodes that loops made of unrolled steps stand for.
        """
        stiff = [loop for loop in plan.unmatched if loop.name in loops]
        if stiff:
            self.refused += stiff
            self.unrolled |= {loop.name for loop in stiff}
            self.known |= {name for loop in stiff for name in loops[loop.name]}
            return True
        kept = [f for f, calls in self.chosen.items() if any(_inside(loop.name, calls) for loop in plan.unmatched)]
        calls = [call for name in kept for call in self.chosen.pop(name)]
        self.refused += [loop for loop in plan.unmatched if _inside(loop.name, calls)]
        return bool(kept)


def _inside(name: str, calls: Sequence[str]) -> bool:
    return any(f"/{call}/" in f"/{name}" for call in calls)


def _kept_steps(
    graph: Graph, keep: Collection[str], refused: Sequence[Refused], known: Collection[str], in_place: bool
) -> list[Unmatched]:
    """What `repeated` finds, for the report alone; a failure of it becomes a line of the report."""
    found: list[Unmatched] = []
    with attempt(found, "steps that are written out", "unrolled"):
        found += repeated(graph, keep, refused, known, in_place)
    return found


def plan_whole(
    graph: Graph,
    keep: Collection[str],
    gradients: Gradients,
    check: Check,
    traced: bool = False,
    rolled: Sequence[RolledGradient] = (),
    slow: Slow | None = None,
    unrolls_draws: bool = False,
) -> RecurrentPlan:
    """What to replace in `graph`: recurrences with their gradients, and those of inference.

    Args:
        graph, keep, gradients, check: as for `plan_training`.
        traced: whether the graph is a function's that is still being traced, and edited in place: an op with side
            effects, as a loop that reads variables is, would run there in any case.
        rolled, slow: see `plan_training`.
        unrolls_draws: see `Needs`.
    """
    names = Names(graph)
    training = plan_training(graph, keep, gradients, check, names, rolled, slow)
    inference = plan_inference(graph, keep, names)
    unmatched = [
        *training.plan.unmatched,
        *(loop for loop in inference.unmatched if loop.name not in training.nodes),
    ]
    candidates: list[Joinable] = []
    for node in graph:
        if node.op in CUDNN and node.name not in training.nodes:
            with attempt(unmatched, node.name, node.op):
                match = match_cudnn(graph, node.name, names, keep)
                if isinstance(match, Unmatched):
                    unmatched.append(match)
                else:
                    candidates.append(joinable_cudnn(graph, match))
    untrained = [match for match in inference.matches if not training.nodes & set(match.removed)]
    untrained += paired(graph, candidates, names, unmatched)
    matches = list(training.plan.matches)
    matches += attempted(unmatched, untrained, lambda match: without_zeros(graph, match, names))
    if unrolls_draws:
        matches = attempted(unmatched, matches, lambda match: unrolled(match, names))
    for match in [each for each in matches if traced and any(graph[name].op in EFFECTS for name in each.removed)]:
        matches.remove(match)
        unmatched.append(Unmatched(match.name, match.carrier, Reason.BEING_TRACED()))
    return RecurrentPlan(tuple(matches), tuple(unmatched))


def plan_inference(graph: Graph, keep: Collection[str] = (), names: Names | None = None) -> RecurrentPlan:
    """What to replace in `graph`, and what not and why.

    Args:
        graph: read with the bodies of its loops (`serde.from_graph_def(..., functions=True)`).
        keep: names of nodes that are fetched; they stay.
        names: gives names to new nodes, also to those of other plans for the graph.
    """
    names = names or Names(graph)
    candidates: list[Joinable] = []
    unmatched: list[Unmatched] = []
    for kind, loops in (("loop", functional_loops), ("lowered loop", lowered_loops)):
        with attempt(unmatched, f"every {kind} from here on", kind):
            for loop in loops(graph):
                with attempt(unmatched, loop.name, loop.carrier):
                    candidates.append(read_loop(graph, loop, names, keep))
    for node, inner in loops_out_of_reach(graph):
        reason = Reason.LOOP_IN_BRANCH if node.op in ("If", "StatelessIf") else Reason.LOOP_IN_CALL
        unmatched.append(Unmatched(node.name, node.op, reason.of(inner)))
    matches = paired(graph, candidates, names, unmatched)
    return RecurrentPlan(tuple(matches), tuple(unmatched))
