"""One of two workers of a MultiWorkerMirroredStrategy on this machine; says "equal" when all was well.

Called with the worker's number and the ports of both.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import numpy as np
import tensorflow as tf

from tests.tf.in_replicas import AMPLE, SCARCE, Training, optimized


def main(index: str, *ports: str) -> None:
    workers = [f"localhost:{port}" for port in ports]
    task = {"type": "worker", "index": int(index)}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == len(workers)
    scarce = Training(strategy)
    scarce.refused(optimized(scarce.in_all, SCARCE), "several workers")
    plain, ample = Training(strategy), Training(strategy)
    step = optimized(ample.in_all, AMPLE)
    expected = plain.losses()
    assert ample.losses(step) == expected
    for ours, theirs in zip(ample.weights, plain.weights, strict=True):
        assert np.isfinite(ours.numpy()).all()
        assert ours.shape == theirs.shape
    print("equal")


if __name__ == "__main__":
    main(*sys.argv[1:])
