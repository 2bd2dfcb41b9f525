"""GPU programs for numbers that steps draw, in front of recurrent kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from custom_ops.jit.cache import Cache
from custom_ops.jit.image import KernelImage
from custom_ops.random import draw_kernels
from graph_passes.graph.ir import Code
from graph_passes.graph.rewrite import NewNode
from graph_passes.passes.recurrent.lower.step_draws import STEP_DRAWS
from graph_passes.passes.recurrent.match import Match, RecurrentNode

Node = NewNode | RecurrentNode
Kind = Literal["cubin", "ptx"]


def with_draws(match: Match, images: Sequence[KernelImage], cache: Cache) -> Match:
    """`match` with a program for each GPU that its recurrent kernels are for, in each op that draws.

    Args:
        match: to be replaced.
        images: of its recurrent kernels.
        cache: of compiled kernels.

    Raises:
        KernelError: the compiler is missing.
    """
    gpus = dict.fromkeys((image.arch, image.kind) for image in images)
    return replace(match, nodes=tuple(_with_programs(node, list(gpus), cache) for node in match.nodes))


def _with_programs(node: Node, gpus: Sequence[tuple[int, Kind]], cache: Cache) -> Node:
    if not isinstance(node, NewNode) or node.op != STEP_DRAWS:
        return node
    attrs: Mapping[str, Any] = node.attrs
    op, dtype = attrs["op"], attrs["Tout"][0].name
    made = [draw_kernels.build(op, dtype, *gpu, cache) for gpu in gpus] if draw_kernels.distribution(op, dtype) else []
    if not made:
        return node
    programs = {"programs": tuple(each.to_text() for each in made), "images": tuple(Code(each.code) for each in made)}
    return replace(node, attrs={**attrs, **programs})
