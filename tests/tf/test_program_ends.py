"""A program ends when it likes: what is planned or compiled in the background then is left undone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import tfmem
from custom_ops import background
from custom_ops.background import PAUSE, Background
from tests.tf.python_server import Ended, call, forked

ROOT = Path(__file__).parents[2]
WAYS = {
    "exit": ("sys.exit(7)", 7),
    "error": ("raise RuntimeError", 1),
    "interrupt": ("os.kill(os.getpid(), 2); time.sleep(60)", -2),
}

# Work that would go on for ever, and a compiler that takes an hour, which tells where it is.
WORK = """
import os, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from custom_ops.background import Background, go_on
from custom_ops.errors import KernelError
from custom_ops.jit import compilers

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

def compile_source():
    sys.path[:0] = [{folder!r}]
    compilers.__name__ = "stand_in"
    with suppress(KernelError), ThreadPoolExecutor(2) as pool:
        list(pool.map(compilers.Compilers(2), ["a", "b", "c"], [90] * 3))

def plan():
    while True:
        go_on()
        time.sleep(0.01)

works = [Background({work}, "work") for _ in range(2)]
for work in works:
    threading.Thread(target=work.wait, daemon=True).start()
while len(list(Path({folder!r}).glob("*.pid"))) < {begun}:
    time.sleep(0.01)
{end}
"""

STAND_IN = """
import os, time
from pathlib import Path
from custom_ops.jit import compilers, nvrtc
def compile_source(source, *_):
    Path({folder!r}, f"{{os.getpid()}}.pid").touch()
    time.sleep(3600)
nvrtc.compile_source = compile_source
main = compilers.main
"""

STEP = """
import sys, time
import tensorflow as tf
import keras
import tfmem

layers = [keras.layers.Dense(16, activation="tanh") for _ in range(200)]
model = keras.Sequential(layers)
x = tf.random.normal([8, 16])
model.build(x.shape)
variables = [variable.value for variable in model.trainable_variables]

@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x) ** 2)
    for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
        variable.assign_sub(0.01 * gradient)
    return loss

if {optimized}:
    step = tfmem.optimize(step, passes=("recurrent", "fusion", "offload"), cache_directory="")
step()
time.sleep({pause})
print("took", time.process_time(), flush=True)
sys.exit(7)
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


def ended(script: str) -> Ended:
    """In a process in which TensorFlow has run nothing."""
    return forked(lambda: exec(compile(script, "<string>", "exec"), {"__name__": "__main__"}))[0]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("work", ["plan", "compile_source"])
def test_a_program_ends_while_work_goes_on(way: str, work: str, tmp_path: Path) -> None:
    end, status = WAYS[way]
    folder, begun = str(tmp_path), 4 if work == "compile_source" else 0
    (tmp_path / "stand_in.py").write_text(STAND_IN.format(folder=folder))
    done = run(WORK.format(folder=folder, work=work, begun=begun, end=end))
    assert done.returncode == status, done.stderr
    assert not [pid for pid in tmp_path.glob("*.pid") if is_alive(int(pid.stem))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pause", [0.0, PAUSE + 1.0])  # before planning, and in the middle of it
def test_a_program_does_not_wait_for_planning(pause: float) -> None:
    took = []
    for optimized in (False, True):
        done = call(ended, STEP.format(optimized=optimized, pause=pause))
        assert done.status == 7, done.output
        took.append(done.seconds - float(re.findall(r"^took (.*)$", done.output, re.MULTILINE)[0]))
    assert took[1] < took[0] + 2.0, took


@pytest.mark.long
def test_planning_asks_often_whether_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning is left undone the first time that the program has ended, however far it is."""
    times: list[float] = []
    last = 10**9

    def has_ended() -> bool:
        if isinstance(threading.current_thread(), background._Thread):
            times.append(time.thread_time())
        return len(times) > last

    monkeypatch.setattr(background, "has_ended", has_ended)
    variables = [tf.Variable(tf.random.normal([8, 8], seed=place)) for place in range(60)]

    def step() -> Any:
        with tf.GradientTape() as tape:
            value = tf.ones([8, 8])
            for variable in variables:
                value = tf.tanh(value @ variable) * 0.5 + value
            loss = tf.reduce_mean(value**2)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.01 * gradient)
        return loss

    def planned() -> bool:
        times.clear()
        optimized = tfmem.optimize(tf.function(step), passes=("fusion",), cache_directory="")
        optimized()
        ((managed,),) = (known.values() for known in optimized._steps.values())
        managed.wait()
        done: bool = managed._state.work.done
        return done

    assert planned()
    assert max(later - earlier for earlier, later in pairwise(times)) < 1.0, times
    asked = len(times)
    assert asked > 100
    for last in (0, 5, asked // 2, asked - 1):
        assert not planned()
        assert len(times) == last + 1


def test_threads_of_the_users_are_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may go on when the main thread has ended; but no thread can be started then."""
    monkeypatch.setattr(background, "has_ended", lambda: True)
    background.go_on()
    work = Background(background.go_on, "work")
    work.begin()
    work.wait()
    assert not work.done
