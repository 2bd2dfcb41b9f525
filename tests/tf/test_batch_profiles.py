"""What was observed of one batch size is the estimate of another: fewer steps are watched, numbers stay the same."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.optimized_runs import SPARE, in_a_process, run
from tfmem.steps.known_profiles import KnownProfiles, _batches


def optimized(net, budget):
    options = tfmem.OffloadOptions(split="never")  # equal to the bit, and refused where no plan meets the budget
    return tfmem.optimize(tf.function(net.step), memory_budget=budget, offload=options)


def rows(batch, count):
    return tuple(part[:count] for part in batch)


def test_another_batch_size_begins_with_the_costs_of_the_first(new_net, batch, flow, smallest, monkeypatch):
    reference = tf.function(new_net().step)
    expected = run(reference, batch) + run(reference, rows(batch, 14))
    budget = SPARE + smallest(lambda size: optimized(new_net(), size)(*rows(batch, 15)))
    budget = max(budget, SPARE + smallest(lambda size: optimized(new_net(), size)(*batch)))
    observed, keep = [], KnownProfiles.keep

    def counted(known, seen):
        observed.append(known)
        keep(known, seen)

    monkeypatch.setattr(KnownProfiles, "keep", counted)
    function = optimized(new_net(), budget)
    found = run(function, batch)
    assert len(observed) == 1
    found += run(function, rows(batch, 14))
    assert len(observed) == 1
    assert found == expected
    traces = [step for steps in function._steps.values() for step in steps.values()]
    (small,) = [step for step in traces if "scaled from batch 16" in str(step.report)]
    assert small.report.decision == "moved"
    assert small.report.peak_measured <= budget
    assert small.settled


def test_a_batch_that_fits_by_far_is_left_as_it_was_at_once(new_net, batch, flow, smallest):
    budget = SPARE + smallest(lambda size: optimized(new_net(), size)(*batch))
    function = optimized(new_net(), budget)
    run(function, batch)
    moved = flow.moved
    run(function, rows(batch, 4), steps=4)
    assert flow.moved == moved


def test_what_does_not_fit_that_batch_is_still_refused(new_net, batch, flow, smallest):
    budget = SPARE + smallest(lambda size: optimized(new_net(), size)(*rows(batch, 8)))
    function = optimized(new_net(), budget)
    run(function, rows(batch, 8), steps=4)
    with pytest.raises(tfmem.InfeasibleBudgetError) as caught:
        function(*batch)
    assert caught.value.smallest_budget > budget


def spec(*shape, dtype="float32"):
    return dtype, shape


def test_signatures_that_differ_in_the_batch_alone():
    old = spec(16, 8), spec(16), spec(3)
    assert _batches(old, (spec(4, 8), spec(4), spec(3))) == (16, 4)
    for other in (
        (spec(16, 8), spec(16), spec(3)),  # the same
        (spec(4, 8), spec(5), spec(3)),
        (spec(4, 9), spec(4), spec(3)),
        (spec(4, 8), spec(4), spec(3), spec(1)),
        (spec(None, 8), spec(4), spec(3)),
        (("float32", None), spec(4), spec(3)),
        (spec(0, 8), spec(0), spec(3)),
        (spec(4, 8, dtype="float64"), spec(4), spec(3)),
        (spec(4, 8), spec(4, 1), spec(3)),
    ):
        assert _batches(old, other) is None, other


def mobile_net(budget):
    keras.utils.set_random_seed(1)
    model = keras.applications.MobileNet(weights=None, input_shape=(32, 32, 3), classes=4, alpha=0.25)
    model.compile("adam", "sparse_categorical_crossentropy")
    return tfmem.optimize(model, memory_budget=budget)


IMAGES, LABELS = np.ones([16, 32, 32, 3], "float32"), np.arange(16) % 4


def refused():
    with pytest.raises(tfmem.InfeasibleBudgetError) as caught:
        mobile_net(1 << 16).train_on_batch(IMAGES, LABELS)
    return caught.value.smallest_budget


def trained(budget):
    model = mobile_net(budget)
    for count, steps in ((16, 7), (12, 5)):
        for _ in range(steps):
            model.train_on_batch(IMAGES[:count], LABELS[:count])
    (training,) = [each for each in model._tfmem_report._functions if each.name == "train"]
    return [str(step.report) for steps in training._step._steps.values() for step in steps.values()]


@pytest.mark.long
def test_a_keras_models_batches(monkeypatch):
    """Its first trace makes the optimizer's variables, so that later ones count scopes otherwise."""
    monkeypatch.setenv("TFMEM_CACHE_DIR", "")
    reports = in_a_process(trained, int(1.1 * in_a_process(refused)))
    assert sum("scaled from batch 16" in report for report in reports) == 1
    assert "OVER BUDGET" not in "".join(reports)
