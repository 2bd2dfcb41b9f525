"""A GPU program of TfmemRecurrent: a kernel, and how a call is divided among its launches.
ops/recurrent/recurrent_program.h reads what `to_text` writes.

The kernel has one parameter, a struct of 64-bit words:
    0: time | batch << 32
    1: first group of this launch | all groups << 32
    2: scratch; 3: status, an int32 that a kernel sets to 1 when a bounded spin ran out (the op then stays with the
       fallback), to 2 when a value was too large for it (the fallback computes this call)
    4: bit d is set when direction d walks time backwards
    5: lines of a sequence from one step to the next | from one row of the batch to the next << 32, where a line is what
       it has for one row in one step: batch and 1 of [time, batch, ...], 1 and time of [batch, time, ...]
    6: step | stage << 32, of a kernel that is launched for each stage of each step
    7...: pointers of each direction's sequences, invariants, vectors, matrices, initial states, outputs, finals
Group g works on tile g % tiles of direction g / tiles, where tiles = ceil(batch / rows)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from custom_ops.jit import nvrtc
from custom_ops.jit.cache import Cache
from custom_ops.jit.image import KernelImage, code_of
from custom_ops.jit.nvrtc import CompileSource
from custom_ops.recurrent.codegen.layout import layout, scheduled
from custom_ops.recurrent.codegen.source import ENTRY, FALLBACK, generate
from custom_ops.recurrent.spec import Configuration, RecurrentSpec

ANY_BATCH = (1 << 31) - 1


@dataclass(frozen=True)
class RecurrentProgram:
    """A compiled kernel for a recurrent cell.

    Attributes:
        image: the kernel.
        fallback: name of the kernel that runs behind one that can find that it cannot give the results, or "".
        rows: of the batch for one group.
        ctas: of a group.
        scratch: bytes of global memory of a group, zero before every launch.
        stages: of a step, each a separate launch; 0: one launch walks the whole sequence.
        max_batch: the largest batch that it was chosen for; 0: none, it stands in for others.
    """

    image: KernelImage
    fallback: str = ""
    rows: int = 1
    ctas: int = 1
    scratch: int = 0
    stages: int = 0
    max_batch: int = ANY_BATCH

    def to_text(self) -> str:
        """All but the code."""
        return self.image.to_text(
            {
                "fallback": self.fallback,
                "rows": self.rows,
                "ctas": self.ctas,
                "scratch": self.scratch,
                "stages": self.stages,
                "max_batch": self.max_batch,
            }
        )


def build(
    spec: RecurrentSpec,
    configuration: Configuration,
    arch: int,
    cache: Cache | None = None,
    max_batch: int = ANY_BATCH,
    compile_source: CompileSource = nvrtc.compile_source,
) -> RecurrentProgram:
    """Generate and compile one kernel, or take it from `cache`.

    Raises:
        KernelError: the configuration does not fit, or the compiler is missing or rejects the source.
    """
    code = code_of(generate(spec, configuration, arch), arch, cache, compile_source=compile_source)
    return _program(spec, configuration, arch, code, max_batch)


def build_ptx(
    spec: RecurrentSpec, configuration: Configuration, arch: int, max_batch: int = ANY_BATCH
) -> RecurrentProgram:
    """A kernel as PTX, for `arch` and all later compute capabilities. Raises what `build` does."""
    code = nvrtc.compile_ptx(generate(spec, configuration, arch), arch)
    found = _program(spec, configuration, arch, code, max_batch)
    return replace(found, image=replace(found.image, kind="ptx"))


def _program(
    spec: RecurrentSpec, configuration: Configuration, arch: int, code: bytes, max_batch: int
) -> RecurrentProgram:
    sizes = layout(spec, configuration, arch)
    image = KernelImage(
        arch=arch,
        entry=ENTRY,
        threads=configuration.threads,
        code=code,
        shared=sizes.shared,
        cluster=configuration.cluster,
        cooperative=configuration.exchange == "grid",
    )
    return RecurrentProgram(
        image=image,
        fallback=FALLBACK if configuration.needs_fallback else "",
        rows=configuration.rows,
        ctas=configuration.ctas,
        scratch=sizes.scratch,
        stages=scheduled(spec, configuration).stages if configuration.exchange == "launches" else 0,
        max_batch=max_batch,
    )
