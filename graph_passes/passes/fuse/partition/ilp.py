"""Chooses patterns by an integer program (FusionStitching, arXiv 1911.11576, section 4.1).

    maximise    sum of score(P) * x(P)
    subject to  sum of x(P) over all P that hold a node <= 1, for each node
                sum of x(P) over the patterns of a cycle <= their number - 1, for each cycle that was found

A plan may close cycles, which only show when patterns are chosen. So the program is solved, its cycles are forbidden,
and it is solved again. Patterns that share no node, directly or by way of others, are separate problems; equal
problems, such as the steps of an unrolled loop, are solved once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from custom_ops.background import go_on
from custom_ops.ordering import DisjointSets
from graph_passes.analysis.dependences import Dependences
from graph_passes.analysis.linear_program import expression, is_complete, solver
from graph_passes.passes.fuse.partition.quotient_graph import QuotientGraph
from graph_passes.passes.fuse.partition.score import Candidate

_NANO = 1e9  # what the solver sees are nanoseconds: its tolerances are made for numbers around one


@dataclass(frozen=True)
class Limits:
    """How far the search goes.

    Attributes:
        gap: the relative gap to the optimum at which the solver stops.
        nodes: of the solver's tree, for each time it is asked.
        rounds: how often cycles are forbidden before those that are left are broken up.
        work: numbers in the constraints of what the solver is asked, times the nodes that it may look at, for all of
            the search; what is left then is chosen greedily. On random problems of 300 to 1,500 patterns, which are
            far harder than those of graphs, a million took HiGHS 4 to 13 s.
        seconds: for all of the search. None, as the plan would be another one in a process that has less of the
            machine: all else here is the same in every process.
    """

    gap: float = 1e-4
    nodes: int = 2000
    rounds: int = 30
    work: int = 1_000_000
    seconds: float | None = None


@dataclass(frozen=True)
class PatternChoice:
    """What was chosen.

    Attributes:
        chosen: positions among the candidates, in increasing order.
        score: seconds that they save.
        greedy: seconds that taking the best first saves.
        solvers: what found the best choices: "HiGHS", "PULP_CBC_CMD", or "greedy" if that was as good.
        problems: how many different ones there were.
        rounds: how often they were solved.
        cuts: how many cycles were forbidden.
        complete: whether no limit was met.
    """

    chosen: tuple[int, ...]
    score: float
    greedy: float
    solvers: tuple[str, ...]
    problems: int
    rounds: int
    cuts: int
    complete: bool


@dataclass(frozen=True)
class _Problem:
    """Scores; sets of positions of which one at most is chosen; sets of which not all are."""

    scores: tuple[float, ...]
    one: tuple[tuple[int, ...], ...]
    cuts: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Numbers in it."""
        return len(self.scores) + sum(map(len, self.one)) + sum(map(len, self.cuts))


@dataclass(frozen=True)
class _Solution:
    chosen: tuple[int, ...]
    solver: str
    complete: bool


def choose_patterns(candidates: Sequence[Candidate], net: Dependences, limits: Limits | None = None) -> PatternChoice:
    """The disjoint candidates that save the most time and are acyclic together.

    Args:
        candidates: patterns, each with a positive score.
        net: what waits for what among the nodes.
        limits: of the search; a plan is found whatever they are.
    """
    return _Search(candidates, net, limits or Limits()).run()


class _Search:
    def __init__(self, candidates: Sequence[Candidate], net: Dependences, limits: Limits) -> None:
        self._candidates = candidates
        self._net = net
        self._limits = limits
        self._end = None if limits.seconds is None else monotonic() + limits.seconds
        self._work = limits.work
        self._cuts: dict[tuple[int, ...], None] = {}
        self._solved: dict[_Problem, _Solution] = {}

    def run(self) -> PatternChoice:
        every = range(len(self._candidates))
        scores = [candidate.score for candidate in self._candidates]
        greedy = self._acyclic(_greedy(_problem(self._candidates, every, ())))
        rounds, complete = 0, True
        while True:
            chosen = self._solve()
            rounds += 1
            found = self._cycles(chosen)
            if found and (rounds == self._limits.rounds or self._is_over):
                chosen, complete = self._acyclic(chosen), False
            elif found:
                self._cuts.update((tuple(cycle), None) for cycle in found)
                continue
            break
        total, first = (sum(scores[place] for place in sorted(plan)) for plan in (chosen, greedy))
        solvers = {solution.solver for solution in self._solved.values()}
        return PatternChoice(
            chosen=tuple(sorted(chosen if total >= first else greedy)),
            score=max(total, first),
            greedy=first,
            solvers=tuple(sorted(solvers if total >= first else {"greedy"})),
            problems=len(self._solved),
            rounds=rounds,
            cuts=len(self._cuts),
            complete=complete and all(solution.complete for solution in self._solved.values()),
        )

    @property
    def _is_over(self) -> bool:
        return self._work <= 0 or (self._end is not None and monotonic() > self._end)

    def _optimum(self, problem: _Problem) -> _Solution:
        """The solution of one problem, whose work is taken from the limit."""
        go_on()
        greedy = _greedy(problem)
        if len(greedy) == len(problem.scores):
            return _Solution(greedy, "greedy", True)
        if self._is_over:
            return _Solution(greedy, "greedy", False)
        seconds = None if self._end is None else max(self._end - monotonic(), 0.1)
        found, nodes = _solved(problem, greedy, self._limits.gap, _nodes(problem, self._limits, self._work), seconds)
        self._work -= problem.size * nodes
        return found

    def _cycles(self, chosen: Sequence[int]) -> list[list[int]]:
        """Some sets of chosen patterns that close a cycle."""
        cycles = QuotientGraph(self._net, [self._candidates[place].members for place in chosen]).cycles()
        return [[chosen[group] for group in cycle] for cycle in cycles]

    def _acyclic(self, chosen: Sequence[int]) -> list[int]:
        """`chosen` without the pattern of each cycle that is worth the least."""
        plan = set(chosen)
        while found := self._cycles(sorted(plan)):
            for cycle in found:
                if plan.issuperset(cycle):
                    plan.remove(min(cycle, key=lambda place: (self._candidates[place].score, -place)))
        return sorted(plan)

    def _solve(self) -> list[int]:
        """The best choice without the cycles that are known."""
        chosen: list[int] = []
        for part in _parts(self._candidates, list(self._cuts)):
            problem = _problem(self._candidates, part, list(self._cuts))
            if problem not in self._solved:
                self._solved[problem] = self._optimum(problem)
            chosen += [part[place] for place in self._solved[problem].chosen]
        return sorted(chosen)


def _parts(candidates: Sequence[Candidate], cuts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Candidates that share a node or a cycle, directly or by way of others."""
    joined = DisjointSets(len(candidates))
    first: dict[int, int] = {}
    for place, candidate in enumerate(candidates):
        for number in candidate.members:
            joined.join(place, first.setdefault(number, place))
    for cut in cuts:
        for place in cut:
            joined.join(place, cut[0])
    parts: dict[int, list[int]] = {}
    for place in range(len(candidates)):
        parts.setdefault(joined.root(place), []).append(place)
    return list(parts.values())


def _problem(candidates: Sequence[Candidate], part: Sequence[int], cuts: Sequence[Sequence[int]]) -> _Problem:
    """A part by positions in it, so that equal parts are equal."""
    position = {place: index for index, place in enumerate(part)}
    holders: dict[int, list[int]] = {}
    for index, place in enumerate(part):
        for number in candidates[place].members:
            holders.setdefault(number, []).append(index)
    one = dict.fromkeys(tuple(places) for places in holders.values() if len(places) > 1)
    inside = [tuple(position[place] for place in cut) for cut in cuts if cut[0] in position]
    return _Problem(tuple(candidates[place].score for place in part), tuple(one), tuple(inside))


def _greedy(problem: _Problem) -> tuple[int, ...]:
    """The best pattern first, then the best of those that may be chosen beside it, and so on."""
    conflicts: list[set[int]] = [set() for _ in problem.scores]
    for places in problem.one:
        for place in places:
            conflicts[place].update(places)
    chosen: set[int] = set()
    for place in sorted(range(len(problem.scores)), key=lambda place: (-problem.scores[place], place)):
        closes = any(place in cut and chosen.issuperset(set(cut) - {place}) for cut in problem.cuts)
        if chosen.isdisjoint(conflicts[place]) and not closes:
            chosen.add(place)
    return tuple(sorted(chosen))


def _nodes(problem: _Problem, limits: Limits, work: int) -> int:
    """How many nodes of the search tree of one problem the work that is left allows."""
    return min(limits.nodes, work // problem.size)


def _solved(
    problem: _Problem, greedy: tuple[int, ...], gap: float, nodes: int, seconds: float | None
) -> tuple[_Solution, int]:
    """What a solver finds, or the greedy choice if that is better; and how many nodes it looked at, at least one."""
    import pulp  # here, since it takes a while to load

    program = pulp.LpProblem("patterns", pulp.LpMaximize)
    x = [program.add_variable(f"x{place}", cat=pulp.LpBinary) for place in range(len(problem.scores))]
    program += expression((x[place], score * _NANO) for place, score in enumerate(problem.scores))
    for places in problem.one:
        program += expression((x[place], 1.0) for place in places) <= 1
    for places in problem.cuts:
        program += expression((x[place], 1.0) for place in places) <= len(places) - 1
    found = solver(gap, nodes, seconds)
    if found is None:
        return _Solution(greedy, "greedy", False), 1
    try:
        complete = is_complete(program, program.solve(found))
    except KeyError:  # PuLP 3.3 has no name for what HiGHS says where it met its limit of nodes; the values are there
        complete = False
    looked = max(_looked_at(program, nodes), 1)
    chosen = tuple(place for place, variable in enumerate(x) if (variable.varValue or 0.0) > 0.5)
    if not _allowed(problem, chosen) or _total(problem, chosen) < _total(problem, greedy):
        return _Solution(greedy, "greedy", complete), looked
    return _Solution(chosen, found.name, complete), looked


def _looked_at(program: Any, most: int) -> int:
    """Nodes of the search tree, where the solver reports them; else all that it was allowed."""
    try:
        return int(program.solverModel.getInfo().mip_node_count)
    except AttributeError:
        return most


def _allowed(problem: _Problem, chosen: Sequence[int]) -> bool:
    found = set(chosen)
    return all(len(found.intersection(places)) <= 1 for places in problem.one) and not any(
        found.issuperset(cut) for cut in problem.cuts
    )


def _total(problem: _Problem, chosen: Sequence[int]) -> float:
    return sum(problem.scores[place] for place in chosen)
