"""The tuner's choices, with benches that make times up."""

import json
from collections import Counter
from dataclasses import dataclass, replace
from threading import Event

import pytest

from custom_ops.errors import KernelError
from custom_ops.jit.cache import CHECKSUM, Cache, digest
from custom_ops.jit.image import KernelImage
from custom_ops.recurrent.gpu_program import ANY_BATCH, RecurrentProgram
from custom_ops.recurrent.search.tune import SweepBench, tune
from custom_ops.recurrent.spec import Configuration
from custom_ops.timing import tuner as generic
from custom_ops.timing.tuner import MeasuredKernel

PLAIN = Configuration()
# told apart by their threads
SMALL, MIDDLE, LARGE = (replace(PLAIN, threads=threads) for threads in (128, 256, 512))


class FakeBench(SweepBench):
    """`times`: (configuration, batch) -> nanoseconds, or the words of an error."""

    def __init__(self, times, identity="machine"):
        self.identity = identity
        self.times = times
        self.compiled = Counter()
        self.measured = Counter()

    def compile(self, configurations):
        self.compiled.update(configurations)

    def build(self, configuration, max_batch=ANY_BATCH):
        stages = int(configuration.exchange == "launches")
        return RecurrentProgram(
            KernelImage(90, "entry", configuration.threads, b"code"), stages=stages, max_batch=max_batch
        )

    def measure(self, configuration, point):
        assert self.compiled[configuration] == 1
        self.measured[configuration, point] += 1
        time = self.times[configuration, point]
        if isinstance(time, str):
            raise KernelError(time)
        return MeasuredKernel(time, 128, 0)


def ranked(*configurations):
    return lambda batch: [(configuration, 10.0 * place) for place, configuration in enumerate(configurations)]


def never(batch):
    raise AssertionError("ranked again")


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path)


def test_the_fastest_of_the_best_ranked_is_kept_for_each_batch(cache):
    bench = FakeBench({(SMALL, 1): 1, (MIDDLE, 1): 2, (SMALL, 8): 5, (MIDDLE, 8): 4})
    tuned = tune(bench, ranked(SMALL, MIDDLE, LARGE), cache, (8, 1), top=2, progress=False)
    assert [(program.image.threads, program.max_batch) for program in tuned.programs] == [(128, 1), (256, ANY_BATCH)]
    assert [(trial.point, trial.measured) for trial in tuned.chosen] == [(1, 1), (8, 4)]
    assert LARGE not in bench.compiled
    assert set(bench.compiled.values()) == {1}


def test_more_of_the_kind_that_was_the_fastest_are_timed(cache):
    """Three of five that are tried are the best ranked."""
    grids = [replace(PLAIN, ctas=ctas, exchange="grid") for ctas in (2, 4, 8)]
    candidates = ranked(SMALL, grids[0], MIDDLE, grids[1], LARGE, grids[2])

    def tried(top, batch, *times):
        known = {(configuration, batch): time for configuration, time in times}
        tuned = tune(FakeBench(known), candidates, cache, (batch,), top=top, progress=False)
        return [trial.configuration for trial in tuned.trials], tuned.chosen[0].configuration

    found = tried(3, 1, (SMALL, 3), (grids[0], 2), (grids[1], 1))
    assert found == ([SMALL, grids[0], grids[1]], grids[1])
    found = tried(4, 8, (SMALL, 2), (grids[0], "too many registers"), (MIDDLE, 3), (LARGE, 1))
    assert found == ([SMALL, grids[0], MIDDLE, LARGE], LARGE)
    found = tried(5, 64, (SMALL, 2), (grids[0], 4), (MIDDLE, 3), (LARGE, 3), (grids[1], 1))  # no more of its kind
    assert found == ([SMALL, grids[0], MIDDLE, LARGE, grids[1]], grids[1])


def test_a_kernel_that_two_batches_want_is_compiled_once(cache):
    grid = replace(PLAIN, ctas=2, exchange="grid")
    times = {(SMALL, 1): 1, (SMALL, 8): 2, (grid, 1): 2, (grid, 8): 1, (MIDDLE, 1): 3, (MIDDLE, 8): 3}
    bench = FakeBench(times)
    lists = {1: ranked(SMALL, MIDDLE), 8: ranked(grid, SMALL)}
    tuned = tune(bench, lambda batch: lists[batch](batch), cache, (1, 8), top=2, progress=False)
    assert [(trial.configuration, trial.point) for trial in tuned.trials] == [
        (SMALL, 1), (MIDDLE, 1), (grid, 8), (SMALL, 8),
    ]  # fmt: skip
    assert set(bench.compiled.values()) == {1}


def test_while_no_kernel_runs_the_next_ones_are_timed(cache):
    """As many again, four times at most."""
    sizes = [replace(PLAIN, threads=threads) for threads in range(32, 32 * 11, 32)]

    def tried(bad):
        times = {(each, bad): "too many CTAs" if place < bad else 1.0 * place for place, each in enumerate(sizes)}
        bench = FakeBench(times)
        return tune(bench, ranked(*sizes), cache, (bad,), top=2, progress=False), bench.measured.total()

    found, count = tried(2)  # after both a pair of which both run
    assert (found.chosen[0].configuration, count) == (sizes[2], 4)
    found, count = tried(7)
    assert (found.chosen[0].configuration, count) == (sizes[7], 8)
    with pytest.raises(KernelError, match="none of 8 kernels runs with a batch of 9: too many CTAs"):
        tried(9)


def test_trials_keep_the_order_of_their_ranks(cache):
    bench = FakeBench({(SMALL, 1): 3, (MIDDLE, 1): 2, (LARGE, 1): 1})
    tuned = tune(bench, ranked(LARGE, SMALL, MIDDLE), cache, (1,), top=None, progress=False)
    assert [trial.configuration for trial in tuned.trials] == [LARGE, SMALL, MIDDLE]
    assert [trial.predicted for trial in tuned.trials] == [0, 10, 20]


def test_one_program_stands_for_sizes_that_agree(cache):
    bench = FakeBench({(SMALL, batch): 1 for batch in (1, 8, 64)})
    tuned = tune(bench, ranked(SMALL), cache, (1, 8, 64), progress=False)
    assert [program.max_batch for program in tuned.programs] == [ANY_BATCH]
    assert tuned.chosen[0].point == 64


@pytest.mark.parametrize("progress", [True, False])
def test_a_bar_shows_how_many_kernels_are_left(cache, capsys, progress):
    times = {(SMALL, 1): 1, (MIDDLE, 1): 2}
    tune(FakeBench(times), ranked(SMALL, MIDDLE), cache, (1,), progress=progress)
    shown = capsys.readouterr().err
    assert ("tuning kernels" in shown and "0/2 [" in shown) == progress
    tune(FakeBench(times), ranked(SMALL, MIDDLE), cache, (1,), progress=progress)
    assert not capsys.readouterr().err  # it was chosen before


def test_kernels_compile_while_those_of_other_batches_are_ranked(cache):
    compiling = Event()

    class Watched(FakeBench):
        def compile(self, configurations):
            super().compile(configurations)
            compiling.set()

    def candidates(batch):
        assert batch == 1 or compiling.wait(timeout=30)
        return [(SMALL, 10.0)] if batch == 1 else [(MIDDLE, 10.0)]

    bench = Watched({(SMALL, 1): 1, (MIDDLE, 8): 1})
    tuned = tune(bench, candidates, cache, (1, 8), progress=False)
    assert [trial.configuration for trial in tuned.trials] == [SMALL, MIDDLE]


def test_more_of_a_batch_is_compiled_while_others_wait_for_their_first(cache):
    compiled = Event()

    class Watched(FakeBench):
        def compile(self, configurations):
            super().compile(configurations)
            assert LARGE not in configurations or compiled.wait(timeout=30)
            if MIDDLE in configurations:
                compiled.set()

    bench = Watched({(SMALL, 1): 2, (MIDDLE, 1): 1, (LARGE, 8): 1})
    grid = replace(PLAIN, ctas=2, exchange="grid")
    bench.times[grid, 1] = 3
    lists = {1: ranked(SMALL, grid, MIDDLE), 8: ranked(LARGE)}
    tuned = tune(bench, lambda batch: lists[batch](batch), cache, (1, 8), top=3, progress=False)
    assert [trial.configuration for trial in tuned.chosen] == [MIDDLE, LARGE]


def test_a_choice_is_read_again_unless_something_it_depends_on_changed(cache):
    times = {(SMALL, 1): 1, (MIDDLE, 1): 2}
    first = tune(FakeBench(times), ranked(SMALL, MIDDLE), cache, (1,), progress=False)

    again = FakeBench(times)
    assert tune(again, never, cache, (1,), progress=False) == first
    assert not again.compiled
    other = FakeBench({(SMALL, 1): 2, (MIDDLE, 1): 1}, identity="another machine")
    assert tune(other, ranked(SMALL, MIDDLE), cache, (1,), progress=False).chosen[0].configuration == MIDDLE


def test_a_kernel_that_fails_is_passed_over_and_says_why(cache):
    bench = FakeBench({(SMALL, 1): "too many registers", (MIDDLE, 1): 2})
    tuned = tune(bench, ranked(SMALL, MIDDLE), cache, (1,), progress=False)
    assert tuned.chosen[0].configuration == MIDDLE
    assert tuned.trials[0].error == "too many registers"


def test_no_kernel_is_an_error_with_its_reason_and_is_not_kept(cache):
    broken = FakeBench({(SMALL, 1): "too many registers"})
    with pytest.raises(KernelError, match="none of 1 kernels runs with a batch of 1: too many registers"):
        tune(broken, ranked(SMALL), cache, (1,), progress=False)
    with pytest.raises(KernelError, match="no configuration fits the device with a batch of 1"):
        tune(broken, ranked(), cache, (1,), progress=False)
    mended = FakeBench({(SMALL, 1): 1})
    assert tune(mended, ranked(SMALL), cache, (1,), progress=False).chosen[0].measured == 1


GRID = replace(PLAIN, ctas=2, exchange="grid")
LAUNCHES = replace(PLAIN, ctas=2, exchange="launches")


@pytest.mark.parametrize(("best", "stages"), [(GRID, [1, 0, 0]), (SMALL, [0])])
def test_a_grid_that_is_chosen_has_a_kernel_that_stands_in_and_waits_for_nobody(cache, best, stages):
    times = {(SMALL, batch): 2 for batch in (1, 8)} | {(GRID, 1): 3, (GRID, 8): 3, (LAUNCHES, 8): 9}
    times[best, 8] = 1
    bench = FakeBench(times)
    tuned = tune(bench, ranked(SMALL, GRID), cache, (1, 8), progress=False, without_waiting=lambda: (LAUNCHES, 5.0))
    assert [program.stages for program in tuned.programs] == stages
    assert [program.max_batch for program in tuned.programs] == ([0, 1] if best == GRID else []) + [ANY_BATCH]
    assert [trial.configuration for trial in tuned.chosen] == ([SMALL, GRID] if best == GRID else [SMALL])
    assert tuned.program_of(1) == tuned.programs[1 if best == GRID else 0]
    assert tuned.program_of(9) == tuned.programs[-1]
    assert bench.compiled[LAUNCHES] == bench.measured[LAUNCHES, 8] == (best == GRID)
    if best == GRID:
        assert (tuned.trials[-1].configuration, tuned.trials[-1].predicted) == (LAUNCHES, 5.0)
    again = tune(bench, never, cache, (1, 8), progress=False, without_waiting=lambda: (LAUNCHES, 5.0))
    assert again == tuned
    assert bench.measured[LAUNCHES, 8] <= 1


def test_no_such_kernel_where_no_grid_is_chosen_or_it_does_not_run(cache):
    bench = FakeBench({(SMALL, 1): 1, (MIDDLE, 1): 1})
    tune(bench, ranked(SMALL, MIDDLE, GRID), cache, (1,), top=2, progress=False, without_waiting=lambda: never(1))
    assert GRID not in bench.compiled
    bench = FakeBench({(GRID, 1): 1, (LAUNCHES, 1): "its results are wrong"}, identity="another machine")
    tuned = tune(bench, ranked(GRID), cache, (1,), progress=False, without_waiting=lambda: (LAUNCHES, 5.0))
    assert [program.stages for program in tuned.programs] == [0]
    assert "its results are wrong" in tuned.trials[-1].error


def test_a_grid_that_is_tried_second_has_one_too(cache):
    """Three are tried: the two that are ranked best, and the next one of the fastest's kind, or any."""
    bench = FakeBench({(SMALL, 1): 3, (MIDDLE, 1): 2, (GRID, 1): 1, (LAUNCHES, 1): 9})
    given = {"top": 3, "progress": False, "without_waiting": lambda: (LAUNCHES, 5.0)}
    tuned = tune(bench, ranked(SMALL, MIDDLE, GRID), cache, (1,), **given)
    assert [program.stages for program in tuned.programs] == [1, 0]


def test_a_kernel_that_waits_for_nobody_can_be_the_fastest(cache):
    bench = FakeBench({(GRID, 1): 2, (LAUNCHES, 1): 1})
    tuned = tune(bench, ranked(GRID, LAUNCHES), cache, (1,), progress=False, without_waiting=lambda: (LAUNCHES, 5.0))
    assert [program.stages for program in tuned.programs] == [1]


BROKEN = ["", "null", "3", "{}", "[]", "[1]", "[{}]", "[[]]", "NaN", "[" * 200_000, "\xff"]
WRONG = {
    "point": ["1", 1.5, None, -1, True, 8],
    "measured": ["1", None, -1, float("nan"), True],
    "predicted": [float("nan"), []],
    "registers": [1.5, None, -1],
    "configuration": [
        None,
        [],
        {"threads": 3},
        {"threads": 128.0},
        {"threads": "128"},
        {"no": 1},
        {"rows": True},
        {"rows": 0},
    ],
    "more": [1],
}
CHANGES = [{name: value} for name, values in WRONG.items() for value in values]
CHANGES += [{"configuration": {"product": "magic"}}, {"configuration": {"exchange": "magic"}}]


@pytest.mark.parametrize("content", [*BROKEN, *CHANGES], ids=range(len(BROKEN) + len(CHANGES)))
def test_a_choice_that_cannot_be_read_is_made_again(content, cache):
    """Though its digest is right."""
    times = {(SMALL, 1): 300, (MIDDLE, 1): 100}
    first = tune(FakeBench(times), ranked(SMALL, MIDDLE), cache, (1,), progress=False)
    (file,) = [path for path in cache.folder.rglob("*") if path.is_file()]
    if isinstance(content, dict):
        content = json.dumps([{**values, **content} for values in json.loads(file.read_bytes()[CHECKSUM:])])
    file.write_text(digest(file.parent.name + file.name, content) + content)
    bench = FakeBench(times)
    assert tune(bench, ranked(SMALL, MIDDLE), cache, (1,), progress=False) == first
    assert bench.measured


@dataclass(frozen=True)
class Tile:
    """A configuration of a kernel that has nothing to do with recurrence."""

    rows: int
    vector: bool = False


class TileBench(generic.Bench):
    """An elementwise kernel over shapes, which are points; a vector pays where rows divide by 4."""

    identity = "tiles on a machine"

    def __init__(self):
        self.measured = []

    def compile(self, configurations):
        pass

    def measure(self, configuration, point):
        rows = int(point.split("x")[0])
        if configuration.vector and rows % 4:
            raise KernelError("misaligned")
        self.measured.append((configuration, point))
        return MeasuredKernel(rows / configuration.rows / (4 if configuration.vector else 1), 16, 0)

    def kind(self, configuration):
        return configuration.vector

    def parse(self, values):
        return Tile(**values)

    def name(self, point):
        return f"a shape of {point}"


def test_a_kernel_of_another_system_is_chosen_by_the_same_tuner(cache):
    tiles = [Tile(rows, vector) for rows in (1, 2, 4) for vector in (False, True)]
    shapes = ["8x3", "7x3"]

    def candidates(shape):
        return [(tile, float(place)) for place, tile in enumerate(tiles)]

    bench = TileBench()
    trials = generic.tune(bench, candidates, cache, shapes, top=4, progress=False)
    best = [generic.fastest(bench, trials, shape).configuration for shape in shapes]
    assert best == [Tile(2, vector=True), Tile(4)]  # the fourth that is timed is the next of the fastest's kind
    assert [trial.point for trial in trials] == ["8x3"] * 4 + ["7x3"] * 4
    assert generic.tune(TileBench(), never, cache, shapes, top=4, progress=False) == trials
    with pytest.raises(KernelError, match="none of 1 kernels runs with a shape of 7x3: misaligned"):
        generic.tune(
            bench, lambda _: [(Tile(1, vector=True), 1.0)], cache, shapes, 1, progress=False, purpose="vectors"
        )
