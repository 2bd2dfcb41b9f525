"""Plans of regions on disk, so that a second process need not make them: the stitched graph, without its kernels.

    graph after Grappler, device, options, code of tfmem --digest--> key
    no file      the passes run, and what they made is kept
    a file       read, given the fastest kernels that are known now, and checked like any edited graph

Only plans by the cost model are kept: `tune="full"` measures while it plans.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from tensorflow.core.framework.graph_pb2 import GraphDef

from custom_ops.code_digest import code_digest
from custom_ops.jit.cache import Cache
from custom_ops.timing.remembered import Remembered
from graph_passes.contract import Contract, Property
from graph_passes.errors import GraphError
from graph_passes.graph.ops import FUSION_OP, is_update
from graph_passes.passes.fuse import kept_plan
from graph_passes.passes.fuse.plan import FusionPlan, Needs
from tfmem.capture.captured import Captured, every_node, op_name
from tfmem.capture.captured_source import CapturedSource
from tfmem.capture.set_shapes import program_shapes
from tfmem.devices import conditions
from tfmem.kernels.fusion_tuning import with_programs
from tfmem.runtime.engine import Engine

FORMAT = "fusion plan 1"
_LARGEST = 128 << 20  # bytes of a file
_CHECKED = Contract(requires=frozenset({Property.WELL_FORMED, Property.TYPED}))


@dataclass(frozen=True)
class KnownPlan:
    """What became of a graph.

    Attributes:
        graph_def: the stitched graph, whose fused ops name no kernels.
        fetches, control_fetches, creation_order: of it; see `Captured`.
        plan: its regions, without programs.
    """

    graph_def: GraphDef
    fetches: tuple[str, ...]
    control_fetches: tuple[str, ...]
    creation_order: tuple[str, ...]
    plan: FusionPlan

    @classmethod
    def of(cls, captured: Captured, plan: FusionPlan) -> KnownPlan | None:
        """None where another process had better see for itself: something failed, or equal regions have other kernels.

        Args:
            captured: the stitched graph.
            plan: what was done to it.
        """
        programs = {(region.text, region.programs) for region in plan.regions}
        if any(each.warned for each in plan.kept) or len(programs) > len({text for text, _ in programs}):
            return None
        graph_def = GraphDef()
        graph_def.CopyFrom(captured.graph_def)
        for node in every_node(graph_def):
            if node.op == FUSION_OP:
                node.attr.pop("programs", None)
                node.attr.pop("images", None)
        bare = with_programs(replace(captured, graph_def=graph_def), {})
        return cls(
            bare.graph_def,
            captured.fetches,
            captured.control_fetches,
            captured.creation_order,
            replace(plan, regions=tuple(replace(region, programs=()) for region in plan.regions)),
        )

    def follow(self, given: Captured, engine: Engine, needs: Needs) -> tuple[Captured, FusionPlan]:
        """The stitched graph with kernels, and the plan.

        Args:
            given: the graph that was planned.
            engine: device and options.
            needs: what planning takes; its programs are those that are known now.

        Raises:
            GraphError, ContractError: this is no plan of `given`.
            KernelError: there is no kernel for a region.
        """
        places = {
            node.attr["region"].s.decode(): node.device for node in every_node(self.graph_def) if node.op == FUSION_OP
        }
        lost = [region.name for region in self.plan.regions if region.text not in places]
        if lost:
            raise GraphError(f"the plan has the region {lost[0]}, and the graph has no such op")
        programs = {
            text: tuple(needs.programs(region, places[text] or needs.home)) if needs.programs else ()
            for text, region in {each.text: each.lowered.region for each in self.plan.regions}.items()
        }
        stitched = replace(
            given,
            graph_def=self.graph_def,
            fetches=self.fetches,
            control_fetches=self.control_fetches,
            creation_order=self.creation_order,
        )
        stitched = with_programs(stitched, {text: made for text, made in programs.items() if made})
        self._check(given, CapturedSource(stitched, engine.settings.feed_shapes))
        regions = tuple(replace(region, programs=programs[region.text]) for region in self.plan.regions)
        return stitched, replace(self.plan, regions=regions)

    def _check(self, given: Captured, source: CapturedSource) -> None:
        """What holds of a graph that the passes edited: TensorFlow imports it, and all that a caller needs is there."""
        graph = source.read(functions=False)
        _CHECKED.require(graph)
        inside = {name for region in self.plan.regions for name in region.schedule.members}
        wanted = [node.name for node in given.graph_def.node if is_update(node.op) and node.name not in inside]
        wanted += [*map(op_name, (*given.feeds, *self.fetches)), *self.control_fetches]
        gone = [name for name in wanted if name not in graph.nodes]
        if gone:
            raise GraphError(f"the plan left out '{gone[0]}'")


def plans(directory: str) -> Remembered[KnownPlan]:
    """The plans of graphs; `directory` is that of all caches, "" keeps nothing."""
    return Remembered(FORMAT, Cache(Path(directory) / "plans", _LARGEST) if directory else None, _written, _read)


def key_of(known: Remembered[KnownPlan], given: Captured, engine: Engine, needs: Needs) -> str:
    """The cache key of a plan: all that the passes after Grappler depend on.

    Args:
        known: where plans are kept.
        given: what Grappler left.
        engine: device and options.
        needs: of the fusion pass.
    """
    settings = engine.settings
    facts = {
        **conditions(settings.target),
        "code": code_digest(),
        "captured": [given.feeds, given.fetches, sorted(given.control_fetches), given.creation_order],
        "feed_shapes": sorted((name, list(shape)) for name, shape in settings.feed_shapes.items()),
        "options": [settings.options.fusion, sorted(settings.passes), settings.stitches],
        "device": [needs.device, needs.home, needs.capabilities is not None],
        "kinds": sorted(kind.name for kind in needs.kinds),
        "callers": [sorted(needs.fed), needs.roots if needs.roots is None else sorted(needs.roots)],
        "timed": [needs.timed, needs.beside is not None, needs.programs is not None],
        "parts": [needs.mirrored, needs.segments if needs.segments is None else sorted(needs.segments.items())],
    }
    graph = given.graph_def.SerializeToString(deterministic=True)
    return known.key(facts, graph, "\n".join(program_shapes(given)))


def _written(known: KnownPlan) -> dict[str, Any]:
    return {
        "graph": base64.b64encode(known.graph_def.SerializeToString(deterministic=True)).decode(),
        "fetches": known.fetches,
        "control_fetches": known.control_fetches,
        "creation_order": known.creation_order,
        "plan": kept_plan.written(known.plan),
    }


def _read(found: Mapping[str, Any]) -> KnownPlan:
    try:
        graph_def = GraphDef.FromString(base64.b64decode(found["graph"], validate=True))
        plan = kept_plan.read(found["plan"])
    except DecodeError as error:
        raise ValueError(f"no plan: {error}") from error
    fetches, control_fetches, order = (tuple(found[each]) for each in ("fetches", "control_fetches", "creation_order"))
    return KnownPlan(graph_def, fetches, control_fetches, order, plan)
