"""The numbers of a recurrent kernel: what `layout.py` finds out, and the kernel's templates take as they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GemmLayout:
    """One product of a CTA, `[rows, depth] @ [depth, columns]`, on its threads.

    A chunk is what a thread multiplies at a time: 4 weights of a column's sum ("fma"), or the fragments of a depth of
    16 for all its tiles (tensor cores).

    Attributes:
        columns: of all its products that this CTA sums up; with slices, those of all CTAs of its cluster.
        depth: length of a sum, all operands together, padded units included.
        lanes: threads (fma) or warps times 32 (mma) that split a sum.
        thread_columns: columns of a thread (fma), or 16-column tiles of a warp (mma).
        chunks: of a thread.
        registers, shared: chunks that stay in registers and in shared memory; the rest is streamed.
        block: rows at a time.
        partials: partial sums of each result, which are added up in shared memory.
        result_stride: floats between rows of the result.
        results: byte offset of the results in shared memory.
        weights: byte offset of the weights in shared memory.
        streamed: byte offset of the weights in a group's scratch.
        received, barrier: byte offsets of the sums that other slices send, and of their mbarriers; 0 with one slice.
    """

    columns: int
    depth: int
    lanes: int
    thread_columns: int
    chunks: int
    registers: int
    shared: int
    block: int
    partials: int
    result_stride: int
    results: int
    weights: int
    streamed: int
    received: int
    barrier: int


@dataclass(frozen=True)
class BufferLayout:
    """One exchange buffer.

    Attributes:
        operands: how many.
        width: numbers that one CTA contributes to one operand's row.
        parts: CTAs whose numbers one CTA reads.
        stride: words of 32 bits between rows in shared memory.
        offset: bytes, of the buffer in shared memory (in scratch for the fallback).
        barrier: bytes, of its mbarriers.
        exchanged: bytes, in the group's scratch (what goes through L2).
        state_operands: bit o is set when operand o is a state.
        form: in which products read its numbers, one of `FORMS`.
        local: whether no CTA sends it.
    """

    operands: int
    width: int
    parts: int
    stride: int
    offset: int
    barrier: int
    exchanged: int
    state_operands: int
    form: int
    local: bool


@dataclass(frozen=True)
class KernelLayout:
    """The numbers of one kernel.

    Attributes:
        tile: units of a CTA, a multiple of 4.
        rows: of the batch, for one group.
        padded_rows: the same in shared memory.
        items: (row, unit) pairs of a thread.
        sum_lanes: lanes of a subgroup that share the accumulator of a (row, unit), where sums stay in the registers of
            the subgroup that makes them; 0 where they go through shared memory.
        replica_items: the same, of what every CTA computes for all units; 0 for none.
        staging: byte offset of what row sums are made of.
        kept: byte offset, in the group's scratch, of what threads keep from one launch to the next ("launches").
        shared: bytes of shared memory of a CTA.
        scratch: bytes of global memory of a group.
        weights: float32 numbers that a thread keeps in registers.
    """

    tile: int
    rows: int
    padded_rows: int
    items: int
    sum_lanes: int
    replica_items: int
    gemms: tuple[GemmLayout, ...]
    buffers: tuple[BufferLayout, ...]
    staging: int
    kept: int
    shared: int
    scratch: int
    weights: int
