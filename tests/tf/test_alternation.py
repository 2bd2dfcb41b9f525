"""Steps and measurements take turns."""

from __future__ import annotations

import threading
import time

import pytest

import tfmem
from tfmem.api import make_engine
from tfmem.runtime import alternation
from tfmem.runtime.alternation import Alternation


def test_nothing_is_measured_while_a_call_runs_and_no_call_begins_meanwhile():
    turns, overlaps, running = Alternation(), [], {"call": 0, "measurement": 0}
    lock = threading.Lock()

    def work(kind: str, count: int) -> None:
        for _ in range(count):
            with getattr(turns, kind)():
                with lock:
                    running[kind] += 1
                    overlaps.append(bool(running["call"] and running["measurement"]))
                time.sleep(1e-3)
                with lock:
                    running[kind] -= 1

    threads = [threading.Thread(target=work, args=(kind, 20)) for kind in ("call", "call", "measurement")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(overlaps) == 60
    assert not any(overlaps)


def test_both_get_on_where_neither_pauses():
    """Each call and each measurement takes a second of a clock that stands still between them."""
    order: list[str] = []
    turns, stop = Alternation(lambda: float(len(order))), threading.Event()

    def work(kind: str) -> None:
        while not stop.is_set():
            with getattr(turns, kind)():
                time.sleep(1e-4)
                order.append(kind)
            if order.count("measurement") > 10:
                stop.set()

    threads = [threading.Thread(target=work, args=(kind,)) for kind in ("call", "measurement")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert stop.is_set()
    assert order.count("call") >= 9 * 10  # eleven measurements, the last of which begins when ten have had their tenth


def test_time_that_measurements_left_unused_is_made_up_for_but_not_all_of_it(monkeypatch: pytest.MonkeyPatch):
    """Planning takes long, and then first runs of its variants take turns with the steps."""
    now, waited = [0.0], [0.0]
    turns = Alternation(lambda: now[0])

    def another_step(seconds: float) -> None:
        now[0] += seconds
        waited[0] += seconds
        with turns.call():
            pass

    monkeypatch.setattr(alternation.time, "sleep", another_step)
    another_step(1000.0)  # a tenth of these would be a hundred seconds of measurements
    waited[0], measured = 0.0, 0
    while not waited[0]:
        with turns.measurement():
            now[0] += 1.0
        with turns.call():
            pass
        measured += 1
    assert measured == 2 + alternation.SAVED * alternation.SHARE  # the last one waited


def test_what_the_device_had_to_do_before_is_not_counted():
    now = [0.0]
    turns = Alternation(lambda: now[0])

    def finish() -> None:
        now[0] += 5.0

    with turns.measurement(finish):
        now[0] += 1.0
    assert turns._next == 1.0 / alternation.SHARE


def test_measurements_have_all_of_the_time_while_no_step_runs():
    now = [0.0]
    turns = Alternation(lambda: now[0])
    with turns.call():
        pass
    now[0] = alternation.IDLE
    for _ in range(3):
        with turns.measurement():
            now[0] += 1.0
    assert now[0] == alternation.IDLE + 3.0


def test_calls_run_at_once():
    turns, meet = Alternation(), threading.Barrier(2, timeout=10)

    def call() -> None:
        with turns.call():
            meet.wait()

    other = threading.Thread(target=call)
    other.start()
    call()
    other.join(10)


def test_a_call_that_waits_for_another_one_is_waited_for_no_longer_than_patience(monkeypatch: pytest.MonkeyPatch):
    """The first call waits for the second, which would wait for the measurement, which waits for the first."""
    monkeypatch.setattr(alternation, "PATIENCE", 0.1)
    turns, second_ran, measured = Alternation(), threading.Event(), threading.Event()

    def measure() -> None:
        with turns.measurement():
            measured.set()

    def second() -> None:
        with turns.call():
            second_ran.set()

    with turns.call():
        threads = [threading.Thread(target=work) for work in (measure, second)]
        for thread in threads:
            thread.start()
        assert second_ran.wait(10)
    for thread in threads:
        thread.join(10)
    assert measured.is_set()


def test_a_device_is_quiet_while_kernels_are_timed():
    """What calls enqueued has run by then; nothing is asked of the context or its streams."""
    engine, order = make_engine(tfmem.Options()), []

    def call() -> None:
        with engine.alternation.call():
            order.append("call")

    with engine.quiet():
        other = threading.Thread(target=call)
        other.start()
        time.sleep(0.05)
        order.append("timed")
    other.join(10)
    assert order == ["timed", "call"]
