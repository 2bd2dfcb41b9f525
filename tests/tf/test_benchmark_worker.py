"""What the offload benchmark keeps of an error."""

from __future__ import annotations

from benchmarks.offload.worker import _head

RAISED = """Graph execution error:

Detected at node vgg19_1/conv1_1/Relu defined at (most recent call last):
  File "/home/user/benchmarks/worker.py", line 238, in <module>

  File "/home/user/benchmarks/worker.py", line 38, in main

Out of memory while trying to allocate 3288334336 bytes.
\t [[{{node vgg19_1/conv1_1/Relu}}]]"""


def test_what_was_said_stays_and_paths_of_this_machine_go() -> None:
    kept = _head(RuntimeError(RAISED))
    assert kept.splitlines()[:3] == [
        "Graph execution error:",
        "Detected at node vgg19_1/conv1_1/Relu",
        "Out of memory while trying to allocate 3288334336 bytes.",
    ]
    assert "/home" not in kept
    assert len(_head(RuntimeError(9 * RAISED))) <= 800
