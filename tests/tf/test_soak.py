"""A few hundred of the soak's seeds; and that it tells a fault, an end of the process and a hang when there is one."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import pytest

from tests.soak import __main__, worker
from tests.soak.graphs import GRAPHS, NEEDED, graph_defs
from tests.soak.mutations import MUTATIONS

SEEDS = [range(1, 13), *(range(first, first + 48) for first in range(13, 301, 48))]


@pytest.fixture(scope="module", name="bases")
def fixture_bases() -> dict[str, Any]:
    return graph_defs()


def test_the_graphs_themselves_train_and_move_what_they_can(bases: dict[str, Any]) -> None:
    assert set(bases) == set(GRAPHS) == set(NEEDED)
    moved, replaced = set(), set()
    for name, graph_def in bases.items():
        arguments = {"device": "CPU:0", "fetches": ["loss", "train"], "memory_budget": f"{sum(NEEDED[name]) // 2}KiB"}
        case = worker.Case(name, graph_def, arguments, live=False)
        found = worker.optimised(case, lambda stage: None)
        assert found["outcome"] not in __main__.FAULTS, found
        moved |= {name} if found["outcome"] in ("moved, equal", "edited, equal") else set()
        replaced |= {name} if found["without"] == "replaced, equal" else set()
    assert moved >= {"convolutions", "attention", "adversarial"}
    assert replaced >= {"lstm"}


def test_a_seed_is_the_same_case_each_time(bases: dict[str, Any]) -> None:
    for seed in range(30):
        one, other = (worker.Case.of(seed, bases) for _ in range(2))
        assert one.graph_def == other.graph_def
        assert one.arguments == other.arguments


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_every_mutation_changes_some_graph(mutation: Any, bases: dict[str, Any]) -> None:
    dice = random.Random(0)
    for _ in range(30):
        graph_def = bases[dice.choice(sorted(bases))]
        changed = type(graph_def)()
        changed.CopyFrom(graph_def)
        mutation(dice, changed, changed.node)
        if changed != graph_def:
            return
    pytest.fail("it never did")


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"from {seeds[0]}")
def test_a_few_hundred(capsys: pytest.CaptureFixture[str], seeds: range) -> None:
    status = __main__.main(["--seed", str(seeds[0]), "--count", str(len(seeds)), "--workers", "2", "--seconds", "300"])
    assert status == 0, capsys.readouterr().out


class Faulty:
    """A worker's process that does what it is told instead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, program: str) -> None:
        script = tmp_path / "worker.py"
        script.write_text(
            f"import sys, json, os, time\nprint('{{}}', flush=True)\nfor line in sys.stdin:\n    {program}\n"
        )
        executable = tmp_path / "python"
        executable.write_text(f"#!/bin/sh\nshift 2\nexec {sys.executable} {script} $@\n")
        executable.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(executable))


STAGE = "print(json.dumps({'stage': 'run'}), flush=True)"
PLAIN = "'plain' in sys.argv"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        (f"{STAGE}; os.abort()", "TensorFlow dies of it, too"),
        (f"{STAGE}; {PLAIN} or os.abort(); print(json.dumps({{'outcome': 'fine'}}), flush=True)", "died"),
        (f"{STAGE}; time.sleep(100)", "TensorFlow hangs, too"),
        (f"{STAGE}; {PLAIN} or time.sleep(100); print(json.dumps({{'outcome': 'fine'}}), flush=True)", "hangs"),
        ("print(json.dumps({'outcome': 'fault'}), flush=True)", "fault"),
        ("print(json.dumps({'outcome': 'unchanged'}), flush=True)", "unchanged"),
    ],
)
def test_what_becomes_of_a_process(program: str, outcome: str, monkeypatch: Any, tmp_path: Any) -> None:
    Faulty(monkeypatch, tmp_path, program)
    waits = 2 if "sleep" in program else 1  # at once for what hangs; else one after the other, in one worker
    found = list(__main__.soak([7, 8], workers=waits, seconds=5))
    assert [result["outcome"] for result in found] == [outcome] * 2
    assert sorted(result["seed"] for result in found) == [7, 8]


def test_results_are_kept_and_not_run_again(monkeypatch: Any, tmp_path: Any, capsys: Any) -> None:
    Faulty(
        monkeypatch, tmp_path, "print(json.dumps({'outcome': 'fault' if int(line) == 3 else 'unchanged'}), flush=True)"
    )
    output = tmp_path / "soak.jsonl"
    assert __main__.main(["--seed", "1", "--count", "2", "--output", str(output)]) == 0
    assert __main__.main(["--seed", "1", "--count", "3", "--output", str(output)]) == 1
    assert sorted(json.loads(line)["seed"] for line in output.read_text().splitlines()) == [1, 2, 3]
    assert __main__.main(["--table", str(output)]) == 1
    assert "3 seeds from 1 to 3, 1 faults" in capsys.readouterr().out
