"""Several workers: two processes of a MultiWorkerMirroredStrategy agree before a step runs, and none ever hangs."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec
from graph_passes.passes.split.split_regions import BatchDivision
from tests.tf import in_workers
from tests.tf.python_server import Ended, call
from tfmem.runtime.workers import Board, Workers
from tfmem.steps import agreed_fusion, agreed_peaks, agreed_trials
from tfmem.steps.agreed_fusion import FusionFinding, Offer, Wish, finding_of_all, offer_of_all, wish_of_all
from tfmem.steps.agreed_trials import Tried
from tfmem.steps.lane_trials import TrialOutcome, best_number
from tfmem.steps.worker_records import ProposedPieces, Record, WorkersVerdict, agree, publish, verdict_of

TASKS = ("/job:worker/task:0", "/job:worker/task:1")
SAID = "\nequal\n"  # a worker that ends first makes TensorFlow write of it in the other one
TIMEOUT = 900  # seconds; a worker that hangs ends by itself before, by the limit of its case
FITS = Record("tfmem 1", "c", budget=10, moves=2)
INFEASIBLE = replace(FITS, why="too small", error="InfeasibleBudgetError", smallest_budget=12, op="x", least=11)


@dataclass(frozen=True)
class Shared(Board):
    """A board of threads."""

    entries: dict[str, str] = field(default_factory=dict)

    def put(self, key: str, value: str) -> bool:
        return self.entries.setdefault(key, value) is value

    def get(self, key: str, until: float) -> str | None:
        while key not in self.entries and time.monotonic() < until:
            time.sleep(0.01)
        return self.entries.get(key)


@contextmanager
def ports() -> Iterator[list[str]]:
    """Free ports. Sockets that only share them hold them meanwhile, so that nothing else on the machine takes one."""
    with ExitStack() as stack:
        found = []
        for _ in TASKS:
            holds = stack.enter_context(socket.socket())
            holds.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holds.bind(("localhost", 0))
            found.append(str(holds.getsockname()[1]))
        yield found


def results(cases: str, folder: Path) -> list[Ended]:
    """The exit status and the output of both workers."""
    with ports() as free:
        return call(in_workers.both, cases, str(folder), free, timeout=TIMEOUT)


@pytest.mark.timeout(960)
@pytest.mark.parametrize(
    "cases",
    [
        "agreeing",
        *(
            pytest.param(case, marks=pytest.mark.long)
            for case in (
                "splits",
                "more_agreeing",
                "over_budget",
                "stitched",
                "trials",
                "regions_are_left",
                "regions_have_no_room",
                "two_devices",
                "other_splits",
                "models_in_pieces",
                "two_devices_in_pieces",
                "models_of_tf_keras_train",
                "plans_of_models_differ",
                "the_disk_of_a_worker_is_full",
                "a_trial_of_a_worker_fails",
            )
        ),
    ],
)
def test_two_workers(cases: str, tmp_path: Path) -> None:
    both = results(cases, tmp_path)
    assert all(each.status == 0 and SAID in each.output for each in both), both
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(960)
@pytest.mark.parametrize(
    "case",
    [
        "worker_1_is_killed_in_a_step",
        pytest.param("worker_0_is_killed_in_a_step", marks=pytest.mark.long),
        pytest.param("worker_1_is_killed_before_it_agrees", marks=pytest.mark.long),
    ],
)
def test_a_worker_is_killed(case: str, tmp_path: Path) -> None:
    """The other one raises, and no spill file stays."""
    victim = int(case.split("_")[1])
    both = results(case, tmp_path)
    assert both[victim].status == -signal.SIGKILL, both
    assert SAID in both[1 - victim].output, both
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(1920)
@pytest.mark.long
def test_training_goes_on_after_a_worker_was_killed(tmp_path: Path) -> None:
    """From where tf_keras's `BackupAndRestore` left off, with the same numbers."""
    spill = tmp_path / "spill"
    spill.mkdir()
    survivor, victim = results("a_model_is_killed", spill)
    assert victim.status == -signal.SIGKILL, victim
    assert SAID in survivor.output, survivor
    both = results("a_model_goes_on", spill)
    assert all(each.status == 0 and SAID in each.output for each in both), both
    assert not list(spill.iterdir())


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (None, "task:1 published nothing on the step within 5 seconds"),
        (replace(FITS, version="tfmem 2"), "task:1 has tfmem 2, and .*task:0 has tfmem 1"),
        (replace(INFEASIBLE, version="tfmem 2"), "task:1 has tfmem 2"),
        (replace(FITS, collectives="d"), "task:1 has other collectives"),
        (replace(FITS, budget=None), "task:1 has no budget"),
        (replace(FITS, why="cuDNN"), r"task:1 cannot plan the step \(cuDNN\)"),
    ],
)
def test_one_worker_makes_all_run_plain(second: Record | None, words: str) -> None:
    verdict = verdict_of({TASKS[0]: FITS, TASKS[1]: second}, 5)
    assert re.search(words, verdict.plain), verdict
    assert verdict.error is None
    assert verdict_of({TASKS[0]: INFEASIBLE, TASKS[1]: second}, 5).plain or second == replace(FITS, why="cuDNN")


def test_all_raise_what_one_worker_has_to_change() -> None:
    more = replace(INFEASIBLE, smallest_budget=20)
    assert verdict_of(dict(zip(TASKS, (FITS, FITS), strict=True)), 5) == WorkersVerdict(moves=True)
    for pair in ((INFEASIBLE, FITS), (FITS, INFEASIBLE), (INFEASIBLE, replace(FITS, why="cuDNN"))):
        verdict = verdict_of(dict(zip(TASKS, pair, strict=True)), 5)
        assert verdict == WorkersVerdict(failed=TASKS[pair.index(INFEASIBLE)], error=INFEASIBLE)
        assert WorkersVerdict.read(verdict.text) == verdict
    assert verdict_of(dict(zip(TASKS, (INFEASIBLE, more), strict=True)), 5).error == more


FEW, MANY = ProposedPieces(4, "few"), ProposedPieces(8, "many")


@pytest.mark.parametrize(
    ("second", "divisions", "failed"),
    [
        (FITS, {TASKS[0]: FEW}, 0),
        (replace(INFEASIBLE, proposal=FEW), {TASKS[0]: FEW}, 0),  # the same pieces are tried once
        (replace(INFEASIBLE, proposal=MANY), {TASKS[1]: MANY, TASKS[0]: FEW}, 0),  # the larger number comes first
        (replace(INFEASIBLE, proposal=MANY, smallest_budget=13), {TASKS[1]: MANY, TASKS[0]: FEW}, 1),
        (replace(INFEASIBLE, smallest_budget=1), {}, 1),  # no pieces help it
        (replace(FITS, why="cuDNN"), {}, 0),
        (replace(FITS, why="cuDNN", error="HostMemoryError"), {}, 0),
    ],
)
def test_all_try_the_pieces_that_one_needs(second: Record, divisions: dict[str, ProposedPieces], failed: int) -> None:
    first = replace(INFEASIBLE, proposal=FEW)
    verdict = verdict_of(dict(zip(TASKS, (first, second), strict=True)), 5)
    assert list(verdict.divisions.items()) == list(divisions.items())
    assert verdict.failed == TASKS[failed]
    assert WorkersVerdict.read(verdict.text) == verdict
    assert Record.read(first.text) == first
    other = replace(second, version="tfmem 2")
    assert not verdict_of(dict(zip(TASKS, (first, other), strict=True)), 5).divisions  # it may know of no pieces


def test_a_worker_without_a_budget_of_the_user_proposes_pieces_too() -> None:
    """Where none serves, all run the unmodified step."""
    first = replace(FITS, why="no plan", proposal=FEW)
    verdict = verdict_of(dict(zip(TASKS, (first, FITS), strict=True)), 5)
    assert verdict.divisions == {TASKS[0]: FEW}
    assert verdict.plain.startswith("/job:worker/task:0 cannot plan the step (no plan)")


def test_a_proposal_is_read_as_it_was_made() -> None:
    division = BatchDivision(64, 4, ((("a", "b"), ("c",)), (("d",), ())))
    found = ProposedPieces.of((division, division))
    assert found.pieces == 4
    assert found.read() == (division, division)


OVER = agreed_peaks.Said({"GPU:1": 1000})
TIGHT = replace(OVER, again=True)


@pytest.mark.parametrize(
    ("second", "plain", "stays", "again"),
    [
        (agreed_peaks.Said(), "", "", ""),
        (OVER, "", "", ""),  # no plan takes less
        (TIGHT, "", "", "1,000 bytes on GPU:1 of /job:worker/task:1"),
        (replace(OVER, why="KeyError: 1"), "/job:worker/task:1 cannot plan again (KeyError: 1)", "", ""),
        (None, "", "/job:worker/task:1 said nothing of its peaks within 5 seconds", ""),
    ],
)
def test_workers_plan_again_where_one_was_over_its_budget(
    second: agreed_peaks.Said | None, plain: str, stays: str, again: str
) -> None:
    found = agreed_peaks.verdict_of({TASKS[0]: agreed_peaks.Said(), TASKS[1]: second}, 5)
    assert found == agreed_peaks.PeaksVerdict(plain, stays, again)
    if second == TIGHT:
        both = agreed_peaks.verdict_of({TASKS[0]: OVER, TASKS[1]: second}, 5)
        assert both == found  # one that has no plan for less changes nothing


def test_workers_choose_plans_by_the_slowest() -> None:
    first, second = Tried(2.0, 0, False), Tried(1.0, 7, True)
    found = agreed_trials.verdict_of(dict(zip(TASKS, (first, second), strict=True)), 5)
    assert found == Tried(2.0, 7, True)
    late = agreed_trials.verdict_of({TASKS[0]: first, TASKS[1]: None}, 5)
    assert late.late == "/job:worker/task:1 said nothing of its plans within 5 seconds"
    assert best_number([TrialOutcome(inf, 0), TrialOutcome(3.0, 0), TrialOutcome(1.0, 7), TrialOutcome(2.0, 0)]) == 3
    assert (
        best_number([TrialOutcome(inf, 0), TrialOutcome(1.0, 7), TrialOutcome(2.0, 6)]) == 2
    )  # all that were measured exceed


OFFER = Offer(kernels="a", regions=2, new=False, moved=2.0, unlimited=1.0)


@pytest.mark.parametrize(
    ("second", "why", "last"),
    [
        (replace(OFFER, kernels="b"), "task:1 would run other kernels than /job:worker/task:0", False),
        (Offer("no room"), "^no room$", False),
        (Offer("a fault", last=True), "^a fault$", True),
        (None, "task:1 published nothing on the step within 5 seconds", True),
    ],
)
def test_no_worker_runs_regions_that_another_does_not(second: Offer | None, why: str, last: bool) -> None:
    found = offer_of_all(dict(zip(TASKS, (OFFER, second), strict=True)), 5)
    assert re.search(why, found.why), found
    assert found.last == last


def test_workers_choose_regions_by_the_slowest() -> None:
    """Workers also choose again where one has new ones; there need not be any on the others."""
    other = Offer(kernels="a", regions=0, new=True, moved=1.0, unlimited=1.5)
    both = offer_of_all(dict(zip(TASKS, (OFFER, other), strict=True)), 5)
    assert both == Offer(regions=2, new=True, moved=2.0, unlimited=1.5)


def test_workers_count_all_peaks_and_the_slowest_times() -> None:
    first, second = FusionFinding("", 3, 1, 2.0, 1.0, 0.1), FusionFinding("", 0, 4, 1.0, 1.5, 0.2)
    both = finding_of_all(dict(zip(TASKS, (first, second), strict=True)), 5)
    assert both == FusionFinding("", 3, 5, 2.0, 1.5, 0.2)
    assert (both.excess, both.less) == (5, 0)
    for other in (None, replace(second, failed="task:1 published nothing")):
        assert "task:1 published nothing" in finding_of_all(dict(zip(TASKS, (first, other), strict=True)), 5).failed


def test_a_worker_with_moves_makes_all_leave_room() -> None:
    wishes = [Wish(facts={"tfmem": "1"}, moves=moves).text for moves in (False, True)]
    for second in wishes:
        found = wish_of_all(dict(zip(TASKS, (wishes[0], second), strict=True)), 5)
        assert found == Wish(moves=second == wishes[1])
    refused = wish_of_all(dict(zip(TASKS, (wishes[0], Wish("no").text), strict=True)), 5)
    assert refused.why == "left unchanged: /job:worker/task:1 does not stitch the step (no)"


def test_all_kernels_that_updates_depend_on_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers have equal kernels, and count twice; what no update depends on does not count."""
    resource = TensorSpec("resource", 4, ())
    nodes = [Node(name, "Placeholder") for name in ("w0", "w1")]
    nodes += [Node(name, "TfmemFused") for name in ("r0", "r1", "unneeded")]
    nodes += [Node(f"u{at}", "AssignVariableOp", [TensorId(f"w{at}"), TensorId(f"r{at}")], outputs=0) for at in (0, 1)]
    graph = Graph(nodes, {TensorId("w0"): resource, TensorId("w1"): resource})
    monkeypatch.setattr(agreed_fusion, "kernel_text", str)

    def digest(*names: str) -> str:
        regions = [
            SimpleNamespace(
                name=name,
                schedule=SimpleNamespace(members=(f"{name}/Tanh",)),
                lowered=SimpleNamespace(region="tanh"),
                programs=(),
            )
            for name in names
        ]
        found: Any = SimpleNamespace(regions=regions)
        return agreed_fusion.digest_of(found, graph)

    assert len({digest(), digest("r0"), digest("r1"), digest("r0", "r1")}) == 4
    assert digest("r1", "r0", "unneeded") == digest("r0", "r1")
    assert digest("r0", "in_a_function") != digest("r0")


def test_all_workers_watch_their_peaks_or_none() -> None:
    watches = replace(FITS, watches=True)
    for second, expected in ((FITS, False), (watches, True)):
        verdict = verdict_of(dict(zip(TASKS, (watches, second), strict=True)), 5)
        assert verdict == WorkersVerdict(watches=expected, moves=True)
        assert WorkersVerdict.read(verdict.text) == verdict


@pytest.mark.parametrize(("patience", "plain"), [(60.0, False), (0.1, True)])
def test_a_late_worker_does_as_the_others(patience: float, plain: bool) -> None:
    """Also where it finds all records, and the others gave up before."""
    entries: dict[str, str] = {}
    found: list[WorkersVerdict] = []

    def join(task: str) -> None:
        board, workers = Shared(task, TASKS, entries), Workers("tfmem 1", patience=patience)
        found.append(agree(board, workers, "train", FITS))

    first = threading.Thread(target=join, args=TASKS[:1])
    first.start()
    while first.is_alive() and (plain or not entries):  # until it has given up, or waits
        time.sleep(0.01)
    join(TASKS[1])
    first.join(60)
    assert len(found) == 2
    assert found[0] == found[1]
    assert bool(found[0].plain) == plain


def test_objects_take_turns() -> None:
    """Two objects that optimise a function of one name have an entry each; a text of a newer version can be read."""
    board = Shared(TASKS[0], TASKS, {})
    keys = [publish(board, workers, "train", FITS.text) for workers in (Workers(), Workers()) for _ in range(2)]
    assert keys == [f"tfmem/train/{turn}" for turn in range(4)]
    newer = json.dumps({"version": "tfmem 9", "collectives": "", "later": 1})
    assert Record.read(newer) == Record("tfmem 9", "")
