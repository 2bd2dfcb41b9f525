"""A compiled kernel with what any launch of it needs to know; ops/cuda/kernel_image.h reads what `to_text` writes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from custom_ops.jit import nvrtc
from custom_ops.jit.cache import Cache, digest
from custom_ops.jit.nvrtc import CompileSource

FORMAT = "kernel 1"


@dataclass(frozen=True)
class KernelImage:
    """A compiled kernel.

    Attributes:
        arch: the compute capability (90 for 9.0): the exact one of a cubin, the least of PTX.
        entry: name of the kernel.
        threads: of a CTA.
        code: a cubin, or PTX.
        shared: bytes of dynamic shared memory of a CTA.
        cluster: CTAs of a thread-block cluster; 1: none.
        cooperative: whether all CTAs of a launch have to run at once.
        kind: "cubin", for one compute capability, or "ptx", which the driver compiles for that one and all later.
    """

    arch: int
    entry: str
    threads: int
    code: bytes
    shared: int = 0
    cluster: int = 1
    cooperative: bool = False
    kind: Literal["cubin", "ptx"] = "cubin"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the code, under which a graph keeps it."""
        return hashlib.sha256(self.code).hexdigest()

    def to_text(self, more: Mapping[str, int | str] | None = None) -> str:
        """All but the code, and what an op adds: lines "key value"."""
        values: dict[str, int | str] = {
            "kind": self.kind,
            "arch": self.arch,
            "entry": self.entry,
            "threads": self.threads,
            "shared": self.shared,
            "cluster": self.cluster,
            "cooperative": int(self.cooperative),
            "digest": self.digest,
            **(more or {}),
        }
        return "\n".join([FORMAT, *(f"{key} {value}" for key, value in values.items() if value != "")])


def code_of(
    source: str,
    arch: int,
    cache: Cache | None = None,
    features: str = "",
    compile_source: CompileSource = nvrtc.compile_source,
    contract: bool = True,
) -> bytes:
    """The code of `source` for `arch` (see `nvrtc.compile_source`), compiled or taken from `cache`, which is NVRTC's.

    Raises:
        KernelError: the compiler is missing or rejects the source.
    """

    def compiled() -> bytes:
        return compile_source(source, arch, features, contract)

    if cache is None:
        return compiled()
    options = nvrtc.compile_options(arch, features, contract)
    return cache.get(digest(nvrtc.compiler_version(), *options, source, *nvrtc.header_texts()), compiled)
