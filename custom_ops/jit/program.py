"""A GPU program: a compiled kernel with all that a launch needs to know. The op library reads the same bytes.

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

from dataclasses import dataclass, fields

from custom_ops.codegen.layout import layout, scheduled
from custom_ops.codegen.recurrent import ENTRY, FALLBACK, generate
from custom_ops.errors import KernelError
from custom_ops.jit import nvrtc
from custom_ops.jit.cache import Cache, digest
from custom_ops.jit.nvrtc import CompileSource
from custom_ops.spec import Configuration, RecurrentSpec

FORMAT = "program 4"
ANY_BATCH = (1 << 31) - 1


@dataclass(frozen=True)
class Program:
    """A compiled kernel.

    Attributes:
        kind: "cubin" or "ptx".
        arch: of a cubin, the exact compute capability; of PTX the least (90 for 9.0).
        entry: name of the kernel.
        fallback: name of the kernel that runs behind one that can find that it cannot give the results, or "".
        rows: of the batch for one group.
        ctas: of a group.
        cluster: CTAs of a thread-block cluster; 1: none.
        threads: of a CTA.
        shared: bytes of dynamic shared memory of a CTA.
        scratch: bytes of global memory of a group, zero before every launch.
        cooperative: whether all CTAs of a launch have to run at once.
        stages: of a step, each a launch of its own; 0: one launch walks the whole sequence.
        max_batch: the largest batch that it was chosen for; 0: none, it stands in for others.
        image: the code.
    """

    kind: str
    arch: int
    entry: str
    fallback: str
    rows: int
    ctas: int
    cluster: int
    threads: int
    shared: int
    scratch: int
    cooperative: int
    stages: int
    max_batch: int
    image: bytes

    def to_bytes(self) -> bytes:
        """A header of lines "key value", an empty line, the image."""
        lines = [FORMAT]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "image" and value != "":
                lines.append(f"{field.name} {value}")
        return "\n".join(lines).encode() + b"\n\n" + self.image


def from_bytes(data: bytes) -> Program:
    """Read what `Program.to_bytes` wrote.

    Raises:
        KernelError: the bytes are not a program of this format.
    """
    head, _, image = data.partition(b"\n\n")
    first, *lines = head.decode(errors="replace").splitlines() or [""]
    if first != FORMAT:
        raise KernelError(f"expected '{FORMAT}' on the first line of a GPU program, found '{first[:40]}'")
    found = dict(line.split(" ", 1) for line in lines if " " in line)
    try:
        values = {
            field.name: found.get(field.name, "") if field.type == "str" else int(found[field.name])
            for field in fields(Program)
            if field.name != "image"
        }
    except (KeyError, ValueError) as error:
        raise KernelError(f"the header of a GPU program lacks a number: {error}") from error
    return Program(**values, image=image)  # type: ignore[arg-type]


def build(
    spec: RecurrentSpec,
    configuration: Configuration,
    arch: int,
    cache: Cache | None = None,
    max_batch: int = ANY_BATCH,
    compile_source: CompileSource = nvrtc.compile_source,
) -> Program:
    """Generate and compile one kernel, or take it from `cache`.

    Raises:
        KernelError: the configuration does not fit, or the compiler is missing or rejects the source.
    """
    image = image_of(generate(spec, configuration, arch), arch, cache, compile_source=compile_source)
    sizes = layout(spec, configuration, arch)
    return Program(
        kind="cubin",
        arch=arch,
        entry=ENTRY,
        fallback=FALLBACK if configuration.needs_fallback else "",
        rows=configuration.rows,
        ctas=configuration.ctas,
        cluster=configuration.cluster,
        threads=configuration.threads,
        shared=sizes.shared,
        scratch=sizes.scratch,
        cooperative=int(configuration.exchange == "grid"),
        stages=scheduled(spec, configuration).stages if configuration.exchange == "launches" else 0,
        max_batch=max_batch,
        image=image,
    )


def image_of(
    source: str,
    arch: int,
    cache: Cache | None = None,
    features: str = "",
    compile_source: CompileSource = nvrtc.compile_source,
) -> bytes:
    """The code of `source` for `arch` (see `nvrtc.compile_source`), compiled or taken from `cache`, which is NVRTC's.

    Raises:
        KernelError: the compiler is missing or rejects the source.
    """

    def compiled() -> bytes:
        return compile_source(source, arch, features)

    if cache is None:
        return compiled()
    headers = (text for item in sorted(nvrtc.headers().items()) for text in item)
    options = nvrtc.compile_options(arch, features)
    return cache.get(digest(nvrtc.compiler_version(), *options, source, *headers), compiled)
