"""Which tensors are the gradients of unrolled steps: the steps and what may be their gradient, run on random numbers.

The steps are put into a scratch `tf.Graph` with TensorFlow's own gradient of them and with the nodes that may be that
gradient. What agrees with TensorFlow's on random numbers of several magnitudes is taken for equal, as in
`gradient_check.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from graph_passes.graph.ir import Graph, TensorId
from graph_passes.passes.recurrent.find.step_gradients import Proposal
from tfmem.capture.gradient_check import ERRORS, FLOAT32, FULL, ROWS, SCALES, TOLERANCES, imported, on_the_host


def step_gradient_exits(graph: Graph, proposal: Proposal) -> dict[TensorId, TensorId]:
    """For each entry of `proposal` that it makes the gradient of, that gradient.

    Returns:
        Nothing if no numbers were found at which all is finite, or the steps cannot be run by themselves.
    """
    for rows in dict.fromkeys([ROWS, *_batches(graph, proposal)]):
        try:
            return _Scratch(graph, proposal, rows).exits()
        except ERRORS:
            continue
    return {}


def _batches(graph: Graph, proposal: Proposal) -> list[int]:
    specs = (graph.specs.get(tensor) for tensor in (*proposal.entries, *proposal.between))
    matrices = (spec.shape for spec in specs if spec is not None and spec.shape and len(spec.shape) == 2)
    return sorted({shape[0] for shape in matrices if shape[0]})[:3]


class _Scratch:
    def __init__(self, graph: Graph, proposal: Proposal, rows: int) -> None:
        self.graph, self.proposal, self.rows = graph, proposal, rows
        self.fed: dict[TensorId, Any] = {}

    def exits(self) -> dict[TensorId, TensorId]:
        proposal = self.proposal
        scratch = tf.Graph()
        with scratch.as_default(), tf.device("/device:CPU:0"):
            entries = [self.placeholder(tensor) for tensor in proposal.entries]
            results = imported(scratch, "steps", proposal.steps, entries)
            count = len(proposal.starts)
            gradients = [self.placeholder(gradient) for _, gradient in proposal.starts]
            others = [self.placeholder(tensor) for tensor in proposal.others]
            found = imported(scratch, "walk", proposal.walk, [*gradients, *results[count:], *entries, *others])
            wanted = dict.fromkeys(entry for entry, _ in proposal.candidates)
            inner = dict(zip(proposal.entries, entries, strict=True))
            expected = tf.gradients(results[:count], [inner[entry] for entry in wanted], gradients)
            expected = [
                tf.zeros_like(inner[entry]) if tensor is None else tf.convert_to_tensor(tensor)
                for entry, tensor in zip(wanted, expected, strict=True)
            ]
        agreeing = self.agreeing(scratch, found, dict(zip(wanted, expected, strict=True)))
        exits: dict[TensorId, TensorId] = {}
        for (entry, tensor), agrees in zip(proposal.candidates, agreeing, strict=True):
            if agrees:
                exits.setdefault(entry, tensor)
        return exits

    def agreeing(self, scratch: Any, found: Sequence[Any], expected: Mapping[TensorId, Any]) -> list[bool]:
        """For each candidate, whether it equals the gradient for all draws, and differs from zero for some."""
        proposal = self.proposal
        same, shown = [True] * len(found), [False] * len(found)
        scales = next((SCALES[each.dtype.name] for each in expected.values() if each.dtype.name in SCALES), FULL)
        with tf.compat.v1.Session(graph=scratch, config=on_the_host()) as session:
            for draw, scale in enumerate(scales):
                values, wanted = session.run([found, expected], self.draw(draw, scale))
                for place, ((entry, _), value) in enumerate(zip(proposal.candidates, values, strict=True)):
                    right = np.asarray(wanted[entry], "float64")
                    largest = np.abs(right).max(initial=0.0)
                    limit = TOLERANCES.get(wanted[entry].dtype.name, FLOAT32) * largest
                    finite = bool(np.isfinite(right).all())
                    close = finite and value.shape == right.shape
                    same[place] &= close and bool((np.abs(np.asarray(value, "float64") - right) <= limit).all())
                    shown[place] |= largest > 0
        return [one and other for one, other in zip(same, shown, strict=True)]

    def placeholder(self, tensor: TensorId) -> Any:
        spec = self.graph.specs.get(tensor)
        if tensor.node in self.graph.constants and tensor not in self.fed:
            self.fed[tensor] = None
            return tf.constant(self.graph.constants[tensor.node])
        if spec is None or spec.shape is None or spec.dtype in ("string", "resource", "variant"):
            raise ValueError(f"'{tensor}' cannot be fed")
        made = tf.compat.v1.placeholder(spec.dtype, [self.rows if size is None else size for size in spec.shape])
        self.fed[tensor] = made
        return made

    def draw(self, draw: int, scale: float) -> dict[Any, npt.NDArray[Any]]:
        dice = np.random.default_rng(draw)
        starts = {gradient for _, gradient in self.proposal.starts}
        feeds = {}
        for tensor, placeholder in self.fed.items():
            if placeholder is None:
                continue
            shape = tuple(placeholder.shape)
            if placeholder.dtype == tf.bool:
                value: npt.NDArray[Any] = dice.random(shape) < 0.7
            elif placeholder.dtype.is_integer:
                value = dice.integers(1, 9, shape)
            else:
                fan_in = shape[0] if len(shape) == 2 else 1
                value = dice.normal(size=shape) * (scale if tensor in starts else max(fan_in, 1) ** -0.5)
            feeds[placeholder] = value.astype(placeholder.dtype.as_numpy_dtype)
        return feeds
