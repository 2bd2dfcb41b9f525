"""Chooses patterns by an integer program (FusionStitching, arXiv 1911.11576, section 4.1).

    maximise    sum of score(P) * x(P)
    subject to  sum of x(P) over all P that hold a node <= 1, for each node
                sum of x(P) over all P that a cycle may pass through <= its patterns - 1, for each cycle that was found

A plan may close cycles, which only show when patterns are chosen. So the program is solved, its cycles are forbidden,
and it is solved again. A cycle enters each of its patterns at one node and leaves it at one. Every other pattern that
holds both closes the cycle in its place, so it is in the sum too. Patterns that share no node, directly or by way of
others, are separate problems; equal problems, such as the steps of an unrolled loop, are solved once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import monotonic
from typing import Any, NamedTuple

from custom_ops.background import go_on
from custom_ops.ordering import DisjointSets
from graph_passes.analysis.dependences import Dependences
from graph_passes.analysis.linear_program import expression, is_complete, solver
from graph_passes.passes.fuse.partition.quotient_graph import Passage, QuotientGraph
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


class _Cut(NamedTuple):
    """Positions, in increasing order, and how many of them may be chosen."""

    places: tuple[int, ...]
    most: int


@dataclass(frozen=True)
class _Problem:
    """Scores; sets of positions of which one at most is chosen; what forbids cycles."""

    scores: tuple[float, ...]
    one: tuple[tuple[int, ...], ...]
    cuts: tuple[_Cut, ...]

    @property
    def size(self) -> int:
        """Numbers in it."""
        return len(self.scores) + sum(map(len, self.one)) + sum(len(cut.places) for cut in self.cuts)


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
        self._cuts: dict[_Cut, None] = {}
        self._solved: dict[_Problem, _Solution] = {}
        self._chosen: dict[tuple[int, int, int], list[int]] = {}  # by a part's first position, size and cuts
        self._joined = DisjointSets(len(candidates))
        for holders in self._holders.values():
            self._join(holders)

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
                self._forbid(found)
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

    def _cycles(self, chosen: Sequence[int]) -> list[list[Passage]]:
        """Some cycles of chosen patterns, and how they pass through these."""
        cycles = QuotientGraph(self._net, [self._candidates[place].members for place in chosen]).cycles()
        return [[passage._replace(group=chosen[passage.group]) for passage in cycle] for cycle in cycles]

    def _cut(self, cycle: Sequence[Passage]) -> _Cut:
        """What forbids a cycle: of the patterns that it may pass through, fewer than it has are chosen.

        Two that hold one entry are never chosen both. So as many as the cycle has would be one for each entry, and
        these close it. A cycle through one pattern is forbidden for this one alone: others may hold all of the path.
        """
        if len(cycle) == 1:
            return _Cut((cycle[0].group,), 0)
        places = {place for each in cycle for place in self._holders[each.enters] & self._holders[each.leaves]}
        return _Cut(tuple(sorted(places)), len(cycle) - 1)

    @cached_property
    def _holders(self) -> dict[int, set[int]]:
        """The positions of the patterns that hold each node."""
        found: dict[int, set[int]] = {}
        for place, candidate in enumerate(self._candidates):
            for number in candidate.members:
                found.setdefault(number, set()).add(place)
        return found

    def _acyclic(self, chosen: Sequence[int]) -> list[int]:
        """`chosen` without the pattern of each cycle that is worth the least."""
        plan = set(chosen)
        while found := self._cycles(sorted(plan)):
            for cycle in found:
                groups = [passage.group for passage in cycle]
                if plan.issuperset(groups):
                    plan.remove(min(groups, key=lambda place: (self._candidates[place].score, -place)))
        return sorted(plan)

    def _solve(self) -> list[int]:
        """The best choice without the cycles that are known. A part in which no more are known is not solved again."""
        chosen: list[int] = []
        cuts = Counter(self._joined.root(cut.places[0]) for cut in self._cuts)
        for part in self._parts():
            known = (part[0], len(part), cuts[self._joined.root(part[0])])
            if known not in self._chosen:
                problem = _problem(self._candidates, part, list(self._cuts))
                if problem not in self._solved:
                    self._solved[problem] = self._optimum(problem)
                self._chosen[known] = [part[place] for place in self._solved[problem].chosen]
            chosen += self._chosen[known]
        return sorted(chosen)

    def _parts(self) -> list[list[int]]:
        """Candidates that share a node or a cycle, directly or by way of others."""
        parts: dict[int, list[int]] = {}
        for place in range(len(self._candidates)):
            parts.setdefault(self._joined.root(place), []).append(place)
        return list(parts.values())

    def _forbid(self, cycles: Iterable[Sequence[Passage]]) -> None:
        for cut in map(self._cut, cycles):
            self._cuts[cut] = None
            self._join(cut.places)

    def _join(self, places: Iterable[int]) -> None:
        first, *others = places
        for place in others:
            self._joined.join(first, place)


def _problem(candidates: Sequence[Candidate], part: Sequence[int], cuts: Sequence[_Cut]) -> _Problem:
    """A part by positions in it, so that equal parts are equal."""
    position = {place: index for index, place in enumerate(part)}
    holders: dict[int, list[int]] = {}
    for index, place in enumerate(part):
        for number in candidates[place].members:
            holders.setdefault(number, []).append(index)
    one = dict.fromkeys(tuple(places) for places in holders.values() if len(places) > 1)
    inside = [_Cut(tuple(position[each] for each in places), most) for places, most in cuts if places[0] in position]
    return _Problem(tuple(candidates[place].score for place in part), tuple(one), tuple(inside))


def _greedy(problem: _Problem) -> tuple[int, ...]:
    """The best pattern first, then the best of those that may be chosen beside it, and so on."""
    conflicts: list[set[int]] = [set() for _ in problem.scores]
    for places in problem.one:
        for place in places:
            conflicts[place].update(places)
    left = [cut.most for cut in problem.cuts]
    cuts_of: dict[int, list[int]] = {}
    for number, cut in enumerate(problem.cuts):
        for place in cut.places:
            cuts_of.setdefault(place, []).append(number)
    chosen: set[int] = set()
    for place in sorted(range(len(problem.scores)), key=lambda place: (-problem.scores[place], place)):
        cuts = cuts_of.get(place, ())
        if chosen.isdisjoint(conflicts[place]) and all(left[number] for number in cuts):
            chosen.add(place)
            for number in cuts:
                left[number] -= 1
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
    for cut in problem.cuts:
        program += expression((x[place], 1.0) for place in cut.places) <= cut.most
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
    return all(len(found.intersection(places)) <= 1 for places in problem.one) and all(
        len(found.intersection(cut.places)) <= cut.most for cut in problem.cuts
    )


def _total(problem: _Problem, chosen: Sequence[int]) -> float:
    return sum(problem.scores[place] for place in chosen)
