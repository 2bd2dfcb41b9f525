"""The fusion benchmark: its cases as data, its tables from results."""

from __future__ import annotations

from pathlib import Path

import pytest

if not (Path(__file__).resolve().parents[2] / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not installed; run from a checkout", allow_module_level=True)

from benchmarks.fusion import compare, merging, tables
from benchmarks.fusion.cases import LARGE, TEN
from benchmarks.fusion.published import KERNELS, TABLE_3
from benchmarks.records import ROOT, load


def ran(**systems: dict) -> dict:
    """An outcome of training, of systems by name with dashes written as underscores."""
    found = {name.replace("auto_jit", "auto-jit"): {"status": "ok", **system} for name, system in systems.items()}
    return {"status": "ok", "training": True, "tf32": True, "device": "CPU", "process_seconds": 1, "systems": found}


@pytest.fixture
def cases() -> dict[str, dict]:
    logistic = ran(
        graph={"ms": 2.0, "kernels": 20, "first_seconds": 0.1},
        auto_jit={"ms": 1.0, "kernels": 10, "clusters": 2},
        jit_compile={"ms": 0.8, "kernels": 8},
        tfmem={"ms": 0.4, "kernels": 4, "difference": 1e-6},
    )
    refusing = ran(graph={"ms": 8.0}, auto_jit={"ms": 4.0}, jit_compile={"status": "refused"}, tfmem={"ms": 4.0})
    return {"word2vec": refusing, "logistic": logistic, "logistic, without TF32": logistic}


def test_speedups_are_over_the_faster_mode_of_xla_that_ran(cases) -> None:
    assert compare.best_xla(cases["logistic"]) == "jit_compile"
    assert compare.best_xla(cases["word2vec"]) == "auto-jit"
    assert compare.over_graph(cases["logistic"], "tfmem") == pytest.approx(5)
    assert compare.over_xla(cases["logistic"]) == pytest.approx(2)
    assert compare.over_xla(cases["word2vec"]) == pytest.approx(1)
    assert compare.fewer(cases["logistic"], "tfmem") == pytest.approx(5)
    assert compare.fewer(cases["word2vec"], "tfmem") is None
    assert compare.mean([2.0, None, 8.0]) == pytest.approx(4)
    assert compare.mean([]) is None


def test_rows_stand_in_the_order_of_the_notes_with_the_papers_beside_them(cases) -> None:
    text = "\n".join(tables.table(cases))
    assert text.index("| logistic |") < text.index("| word2vec |")
    assert "| logistic | 2.000 | 1.000 | 0.800 | 0.400 | 5.00x | 2.00x | 5.00x | 2.00x | 1e-06 |" in text
    assert "| word2vec | 8.000 | 4.000 | refused | 4.000 | 2.00x | 1.00x | 2.00x | 1.00x | - |" in text
    assert "| logistic | logistic | 2.50x | 5.00x | 1.50x | 4.60x | 2.50x | 5.00x | 1.46x | 1.83x |" in text
    # over graph: sqrt(2.5 * 2), sqrt(5 * 2), over XLA sqrt(2 * 1)
    means = "XLA's better mode over graph 2.24x, tfmem over graph 3.16x, tfmem over XLA's better mode 1.41x, "
    means += "fusion alone over graph 3.16x, fusion alone over XLA's better mode 1.41x"
    assert f"Geometric means of the ten: {means}." in text
    assert "### First calls, s, without TF32" in text


def test_recurrent_kernels_do_not_count_as_fusion(cases) -> None:
    cases["birnn"] = ran(graph={"ms": 30.0}, jit_compile={"ms": 4.0}, tfmem={"ms": 1.0})
    text = "\n".join(tables.table(cases))
    assert "| birnn | 30.000 | - | 4.000 | 1.000 | 30.00x | 4.00x | - | - |" in text
    assert "tfmem over graph 6.69x" in text  # the cube root of 5 * 2 * 30
    assert "fusion alone over graph 3.16x (of 2), fusion alone over XLA's better mode 1.41x (of 2)." in text
    cases["birnn"]["systems"]["fusion"] = {"ms": 5.0}
    text = "\n".join(tables.table(cases))
    assert "| birnn | 30.000 | - | 4.000 | 1.000 | 5.000 | 30.00x | 4.00x | 6.00x | 0.80x |" in text
    assert "fusion alone over graph 3.91x, " in text  # the cube root of 5 * 2 * 6


def test_a_step_that_runs_as_given_is_marked(cases) -> None:
    older = {"fusion": "left as it was: stitched it took 2 ms a step against 1 ms, on copies"}
    newer = {"fusion": older["fusion"].replace("as it was", "unchanged")}
    for found in (older, newer, {"stitched": False}):
        cases["word2vec"]["systems"]["tfmem"] = {"status": "ok", "ms": 4.0} | found
        text = "\n".join(tables.table(cases))
        assert "| word2vec | 8.000 | 4.000 | refused | 4.000 (as given) |" in text
        assert "Runs as given, since stitching it was no faster: word2vec." in text
    cases["word2vec"]["systems"]["tfmem"]["stitched"] = True
    assert "(as given)" not in "\n".join(tables.table(cases))


def test_the_papers_figure_7_is_of_its_applications() -> None:
    busy = {"nmt": 4.0, "multi_interests": 15.0, "rokid": 5.0, "aiwriter": 16.0, "mlp": 1.0}
    found = {
        name: ran(graph={"ms": 9.0}, jit_compile={"ms": 1.0, "busy_ms": 10.0}, tfmem={"ms": 1.0, "busy_ms": ms})
        for name, ms in busy.items()
    }
    text = tables.busy(found)
    assert "| multi_interests | 10.000 | 15.000 | 1.50 | 1.50 |" in text
    assert "paper's applications |  |  | 1.00 | 1.00 |" in text  # (.4 + 1.5 + .5 + 1.6) / 4; mlp is no application
    assert tables.busy({"nmt": ran(graph={"ms": 1.0})}) == ""


def test_a_loss_that_strays_is_wrong_where_products_are_exact(cases) -> None:
    outcome = cases["logistic"]
    assert not compare.wrong(outcome)
    outcome["systems"]["tfmem"]["difference"] = 2e-4
    assert compare.wrong(outcome)
    assert "(WRONG)" in "\n".join(tables.table(cases))
    assert "| 0.0003 |" in "\n".join(tables.table({"logistic": outcome | {"strays": 3e-4}}))
    outcome["device"] = "NVIDIA H200"
    assert not compare.wrong(outcome)
    outcome["tf32"] = False
    assert compare.wrong(outcome)
    outcome["systems"]["tfmem"]["difference"] = float("nan")
    assert compare.wrong(outcome)


def test_losses_after_the_first_steps_stand_beside_tensorflows_own_distances(cases) -> None:
    outcome = cases["logistic"]
    outcome["systems"]["tfmem"] |= {"difference": 2e-2, "differences": [1e-7, 2e-6, 2e-2]}
    outcome["strays_after"] = [1e-7, 1e-6, 1e-2]
    assert "| 1e-07, 2e-06, 0.02 (WRONG) | 1e-07, 1e-06, 0.01 |" in "\n".join(tables.table(cases))


def test_large_tensors_are_held_against_a_copy() -> None:
    outcome = ran(graph={"ms": 3.0}, copy={"ms": 1.0, "moved": 2_000_000})
    outcome |= {"moved": 3_000_000, "shapes": [[10, 20]]}
    assert compare.of_copy(outcome, "graph") == pytest.approx(0.5)
    text = "\n".join(tables.table({LARGE[0]: outcome}))
    assert "| 10x20 | 3.000 | - | - | - | 2 | 50% |" in text  # 2 MB in a millisecond
    assert "Median step" not in text


def test_every_workload_of_the_paper_is_there() -> None:
    assert set(TEN) == set(TABLE_3) == set(KERNELS)
    assert compare.mean(row.stitched for row in TABLE_3.values()) == pytest.approx(2.3, abs=0.1)
    over_xla = compare.mean(row.stitched / row.xla for row in TABLE_3.values())
    assert over_xla == pytest.approx(1.4, abs=0.05)  # as the paper's text says


def test_what_merging_brings_is_shown_by_form() -> None:
    found = load(ROOT / "benchmarks/results/fusion_merging_h200.json")
    assert found is not None
    assert set(found["cases"]) == set(merging.FORMS)
    for name, outcome in found["cases"].items():
        assert tuple(outcome["forms"]) == merging.FORMS[name]
        assert len(merging.lines(name, outcome)) == len(merging.FORMS[name])
    assert "timeout" in merging.lines("nmt", {"status": "timeout", "message": "late"})[0]
