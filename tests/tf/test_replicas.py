"""Distribution strategies: steps of several replicas keep their numbers, whether tensors move or not."""

from __future__ import annotations

import pytest

from tests.tf.python_server import ROOT, run_python

TIMEOUT = 900  # seconds; what waits for itself would never end, and ends by the limit of its case


def require_equal(module: str, *cases: str) -> None:
    """That the cases end well in a separate process, which has two devices."""
    done = run_python(["-m", f"tests.tf.{module}", *cases], cwd=ROOT, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.endswith("equal\n")


def long(*cases: str) -> list[object]:
    return [pytest.param(case, marks=pytest.mark.long) for case in cases]


@pytest.mark.timeout(960)
@pytest.mark.parametrize("cases", ["loops", *long("keras", "predictions", "collectives", "tf_keras")])
def test_two_replicas(cases: str) -> None:
    require_equal("in_replicas", cases)


@pytest.mark.long
@pytest.mark.timeout(960)
def test_plans_are_compared_by_steps_of_all_replicas() -> None:
    require_equal("in_replicas_trials")


@pytest.mark.timeout(960)
@pytest.mark.parametrize("cases", long("loops", "faster", "data", "draws", "keras", "tf_keras"))
def test_two_replicas_in_pieces_of_the_batch(cases: str) -> None:
    require_equal("in_replicas_splits", cases)


@pytest.mark.timeout(960)
@pytest.mark.parametrize(
    "cases",
    [
        *long(
            "loops",
            "embeddings_keras",
            "other_loops",
            "of_keras_3",
            "optimizers",
            "recurrent",
            "embeddings_tf_keras",
            "of_tf_keras",
            *(
                f"{case}_{library}"
                for case in ("callbacks", "mixed_precision", "batch_norms", "metrics", "strategies_of_one_variable")
                for library in ("keras", "tf_keras")
            ),
        ),
    ],
)
def test_uses(cases: str) -> None:
    require_equal("in_replicas_uses", cases)


@pytest.mark.timeout(960)
@pytest.mark.parametrize("cases", ["example", *long("dynamic")])
def test_dynamic_nets(cases: str) -> None:
    require_equal("in_replicas_dynamic", cases)


@pytest.mark.timeout(960)
@pytest.mark.parametrize("cases", ["servers", *long("forms", "meshes")])
def test_what_has_no_plan_runs_or_is_refused(cases: str) -> None:
    require_equal("in_other_strategies", cases)


@pytest.mark.timeout(960)
@pytest.mark.parametrize(
    "cases", ["loops", *long("moves", "other_moves", "moves_keras", "keras", "collectives", "tf_keras")]
)
def test_two_fused_replicas(cases: str) -> None:
    require_equal("fused_replicas", cases)
