"""What a `FusionPlan` does to a graph; makes no choice."""

from __future__ import annotations

from graph_passes.analysis.dependences import waited
from graph_passes.graph.ir import AttrValue, Code, DataType, Graph, TensorId
from graph_passes.graph.ops import FUSION_OP
from graph_passes.graph.rewrite import NewNode, Rewrite
from graph_passes.passes.fuse.plan import FusionPlan, RegionPlan, place_of


def fusion_rewrites(plan: FusionPlan, graph: Graph) -> list[Rewrite]:
    """Each region becomes one op."""
    return [_rewrite(region, graph) for region in plan.regions]


def _rewrite(region_plan: RegionPlan, graph: Graph) -> Rewrite:
    lowered, members = region_plan.lowered, region_plan.schedule.members
    inside, region = set(members), lowered.region
    attrs: dict[str, AttrValue] = {
        "T_args": tuple(DataType(found.dtype) for found in region.values[: region.inputs]),
        "N": len(region.variables),
        "T_out": tuple(DataType(region.values[value].dtype) for value in region.outputs),
        "region": region_plan.text,
    }
    if region_plan.programs:
        attrs["programs"] = tuple(program.to_text() for program in region_plan.programs)
        attrs["images"] = tuple(Code(program.image.code) for program in region_plan.programs)
    if region_plan.timed:
        attrs["time_products"] = True
    if not region_plan.keeps_memory:
        attrs["keep_memory"] = False
    before = dict.fromkeys(each for name in members for each in waited(graph, graph[name]) if each not in inside)
    new = NewNode(
        region_plan.name,
        FUSION_OP,
        (*lowered.inputs, *lowered.variables),
        attrs,
        place_of(graph, members),
        tuple(before),
        len(lowered.outputs),
    )
    outputs = {tensor: TensorId(region_plan.name, index) for index, tensor in enumerate(lowered.outputs)}
    return Rewrite(
        region_plan.name,
        (new,),
        tuple(outputs.items()),
        replaced=members,
        successor=region_plan.name,
        renamed=tuple((name, outputs[TensorId(name)]) for name in region_plan.renamed),
    )
