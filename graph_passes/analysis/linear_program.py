"""Linear and integer programs, and the solver that PuLP finds for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from custom_ops.background import go_on

INFINITY = float("inf")
LARGE = 200_000  # numbers: of such a program without integers, edges take several times as long as the interior


class UnsolvedError(Exception):
    """A program that has no solution, or whose solver is missing, stopped or failed."""


@dataclass
class LinearProgram:
    """Minimise the cost of variables under linear rows. It is filled once, and solved as it is or relaxed.

    Attributes:
        costs, lower, upper: of each variable.
        whole: whether each variable is an integer.
        rows: (terms, whether the sum equals the bound or is at most that, the bound).
    """

    costs: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[tuple[tuple[tuple[int, float], ...], bool, float]] = field(default_factory=list)

    def variable(self, cost: float = 0.0, lower: float = 0.0, upper: float = INFINITY, *, whole: bool = False) -> int:
        """Add a variable; returns its number."""
        self.costs.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.costs) - 1

    def at_most(self, terms: Iterable[tuple[int, float]], bound: float) -> None:
        """The sum of coefficients times variables is at most `bound`."""
        self.rows.append((tuple(terms), False, bound))

    def equal(self, terms: Iterable[tuple[int, float]], value: float) -> None:
        """The sum of coefficients times variables is `value`."""
        self.rows.append((tuple(terms), True, value))

    @property
    def size(self) -> int:
        """Numbers in it."""
        return len(self.costs) + sum(len(terms) for terms, _, _ in self.rows)


@dataclass(frozen=True)
class Solution:
    """Values of a program's variables.

    Attributes:
        values: of each variable.
        cost: of these values.
        solver: its name.
        optimal: whether no limit was met.
    """

    values: tuple[float, ...]
    cost: float
    solver: str
    optimal: bool


def solver(gap: float, nodes: int, seconds: float | None, interior: bool = False) -> Any:
    """HiGHS where it is installed, else CBC, which comes with PuLP 3 and which PuLP 4 finds where it is installed; None
    if neither runs here. HiGHS goes through the `interior` of what programs without integers allow, not along edges."""
    import pulp  # here, since it takes a while to load

    common = {"msg": False, "threads": 1, "gapRel": gap, "timeLimit": seconds}
    if pulp.HiGHS(msg=False).available():
        method = {"solver": "ipm"} if interior else {}
        return pulp.HiGHS(**common, random_seed=0, mip_max_nodes=nodes, **method)
    cbc = getattr(pulp, "PULP_CBC_CMD", pulp.COIN_CMD)
    return cbc(**common, maxNodes=nodes) if cbc(msg=False).available() else None


def is_complete(program: Any, result: Any) -> bool:
    """Whether PuLP says that a solved program met no limit."""
    import pulp

    if hasattr(program, "sol_status"):
        return bool(program.sol_status == pulp.LpSolutionOptimal)
    # PuLP 4 returns a result that has the status
    return result.status in (pulp.LpSolveStatus.Optimal, pulp.LpSolveStatus.GapLimit)


def expression(terms: Iterable[tuple[Any, float]]) -> Any:
    """The sum of PuLP's variables times factors, made at once: PuLP's own products and sums make an object a term.

    Args:
        terms: (variable, factor); a variable may come several times.
    """
    import pulp

    total: dict[Any, float] = {}
    for variable, factor in terms:
        if factor:
            total[variable] = total.get(variable, 0.0) + factor
    made: Any = pulp.LpAffineExpression
    return getattr(made, "from_dict", made)(total)  # PuLP 4 has a name for it


def solved(
    program: LinearProgram, *, relaxed: bool = False, gap: float = 1e-4, nodes: int = 200, seconds: float | None = None
) -> Solution:
    """The solution that the solver finds.

    Args:
        program: what to solve.
        relaxed: whether integers may have any value between their limits.
        gap: the relative gap to the optimum at which the solver stops.
        nodes: of the solver's tree, at most.
        seconds: at most; None for no limit.

    Raises:
        UnsolvedError: there is none, or the solver is missing, stopped or failed.
    """
    go_on()
    import pulp

    found = solver(gap, nodes, seconds, relaxed and program.size > LARGE)
    if found is None:
        raise UnsolvedError("no solver is installed; pip install highspy")
    try:
        model, variables = _model(program, relaxed)
        try:
            optimal = is_complete(model, model.solve(found))
        except KeyError:  # PuLP 3.3 has no name for what HiGHS says where it met its limit of nodes
            optimal = False
        values = [variable.varValue for variable in variables]
    except Exception as error:  # whatever a foreign library raises; a process that was killed is a PulpSolverError
        raise UnsolvedError(f"the solver failed: {type(error).__name__}: {error}") from error
    if any(value is None for value in values) or not _holds(program, values, relaxed):
        raise UnsolvedError(f"{found.name} found no solution")
    del pulp
    return Solution(tuple(values), _cost(program, values), found.name, optimal)


def _model(program: LinearProgram, relaxed: bool) -> tuple[Any, list[Any]]:
    import pulp

    model = pulp.LpProblem("plan", pulp.LpMinimize)
    limits = zip(program.lower, program.upper, program.whole, strict=True)
    variables = [
        model.add_variable(
            f"x{number}",
            lower,
            None if upper == INFINITY else upper,
            pulp.LpInteger if whole and not relaxed else pulp.LpContinuous,
        )
        for number, (lower, upper, whole) in enumerate(limits)
    ]
    model += expression(zip(variables, program.costs, strict=True))
    for terms, equal, bound in program.rows:
        left = expression((variables[number], factor) for number, factor in terms)
        model += (left == bound) if equal else (left <= bound)
    return model, variables


def _cost(program: LinearProgram, values: Sequence[float]) -> float:
    return sum(cost * value for cost, value in zip(program.costs, values, strict=True))


def _holds(program: LinearProgram, values: Sequence[float], relaxed: bool) -> bool:
    """Whether values meet the program, but for what solvers tolerate."""
    for value, lower, upper, whole in zip(values, program.lower, program.upper, program.whole, strict=True):
        if not lower - 1e-4 <= value <= upper + 1e-4 or (whole and not relaxed and abs(value - round(value)) > 1e-4):
            return False
    for terms, equal, bound in program.rows:
        total = sum(factor * values[number] for number, factor in terms)
        slack = 1e-4 * max(1.0, abs(bound), *(abs(factor) for _, factor in terms))
        if total > bound + slack or (equal and total < bound - slack):
            return False
    return True
