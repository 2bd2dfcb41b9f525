"""What a persistent recurrent kernel computes (`RecurrentSpec`), and how it is laid out on a GPU (`Configuration`).

Both are values: equal ones give the same source, the same artifact and the same place in a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from custom_ops.errors import KernelError
from custom_ops.machine import WARP
from custom_ops.recurrent.cell import Cell

DataType: TypeAlias = Literal["float32", "float16", "bfloat16"]
Precision: TypeAlias = Literal["highest", "tf32", "bfloat16", "float16"]
ProductMethod: TypeAlias = Literal["fma", "mma", "half"]
Exchange: TypeAlias = Literal["single", "cluster", "grid", "launches"]

LARGEST_CLUSTER = 16  # CTAs, on Hopper; more than 8 is not portable and has to be allowed


@dataclass(frozen=True)
class RecurrentSpec:
    """One cell of a given size, swept over a sequence.

    Attributes:
        cell: the step.
        units: the hidden size, any positive number.
        dtype: of all tensors; sums and states are float32 whatever it is.
        precision: what a product with a state may round to: "highest" keeps float32's accuracy.
        directions: sweeps in one launch, each with its own tensors: 2 for a bidirectional layer.
    """

    cell: Cell
    units: int
    dtype: DataType = "float32"
    precision: Precision = "highest"
    directions: int = 1

    def __post_init__(self) -> None:
        if self.units < 1:
            raise KernelError(f"a hidden size of {self.units}: expected at least 1")
        if self.dtype not in get_args(DataType):
            raise KernelError(f"no GPU kernel for {self.dtype}: expected one of {', '.join(get_args(DataType))}")
        if self.precision not in get_args(Precision):
            raise KernelError(f"precision '{self.precision}': expected one of {', '.join(get_args(Precision))}")
        if not 1 <= self.directions <= 64:
            raise KernelError(f"{self.directions} directions: expected 1 to 64")


@dataclass(frozen=True)
class Configuration:
    """How a group of CTAs shares the rows of one batch tile (GRNN, sections 5 and 6).

    CTA j of a group owns the hidden units [j * width, (j + 1) * width), all gates of them: output-based tiling. Within
    a CTA a subgroup of `lanes` threads splits the sums of a set of columns; its subgroups split the columns.
    Warps that make no whole subgroup are idle. The paper's tile height is `rows`, its tile width follows from `ctas`.

    Attributes:
        rows: of the batch, for one group.
        ctas: of a group; with more than one they exchange operands every step.
        threads: of a CTA.
        lanes: threads of a subgroup, a power of two up to 32 or a multiple of 32; above 32 its warps' sums are added up
            in shared memory.
        register_weights: how many weights a thread keeps in registers.
        shared_weights: how many more a thread keeps in shared memory; what is left is read from L2 every step.
        product: "fma" on the ordinary cores; "mma" on the tensor cores (three TF32 products for precision "highest");
            "half" on the tensor cores with 16-bit numbers, pairs of float16 for precision "highest". float16 is for
            cells whose products read nothing but states and other values that are bounded.
        exchange: "single" CTA, thread-block "cluster" (distributed shared memory), "grid" (through L2), or "launches"
            (through L2, and a launch for each stage of a step: each reads all its weights, and waits for no other CTA).
            What weights a CTA of "launches" keeps is read from the matrices by each launch, which is slow; the rest
            is laid out for it by the first.
        slices: of a group that exchanges through L2: so many CTAs at a time are a cluster, and share the depth of their
            sums, so that each reads a part of the operands only.
        replicated: whether every CTA computes for all units what is wanted by later products alone, where it can, so
            that no CTA waits for it: a canonical GRU's reset gate, and with it one exchange a step instead of two.
            Products of states it has by partial sums: each CTA multiplies its own units of a state, and all add up what
            all have sent (GRNN's single synchronisation, section 5).
    """

    rows: int = 1
    ctas: int = 1
    threads: int = 256
    lanes: int = 16
    register_weights: int = 128
    shared_weights: int = 0
    product: ProductMethod = "fma"
    exchange: Exchange = "single"
    slices: int = 1
    replicated: bool = False

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise KernelError(f"{self.rows} rows: expected at least 1")
        if self.threads % WARP or not WARP <= self.threads <= 1024:
            raise KernelError(f"{self.threads} threads: expected a multiple of {WARP} up to 1024")
        if not 1 <= self.lanes <= self.threads or (self.lanes % WARP and WARP % self.lanes):
            raise KernelError(
                f"{self.lanes} lanes: expected a power of two up to {WARP}, or a multiple of {WARP} up to the "
                f"{self.threads} threads"
            )
        if (self.ctas == 1) != (self.exchange == "single") or self.ctas < 1:
            raise KernelError(f"{self.ctas} CTAs with exchange '{self.exchange}': 'single' is for exactly one CTA")
        if self.exchange == "cluster" and self.ctas > LARGEST_CLUSTER:
            raise KernelError(f"a cluster of {self.ctas} CTAs: the hardware has at most {LARGEST_CLUSTER}")
        if self.slices < 1 or self.ctas % self.slices or (self.slices > 1 and self.exchange != "grid"):
            raise KernelError(
                f"{self.slices} slices of {self.ctas} CTAs with exchange '{self.exchange}': expected a divisor of the "
                "CTAs, and more than 1 for 'grid' alone"
            )
        if self.exchange == "launches" and (self.replicated or self.product == "half"):
            raise KernelError(
                f"replicated={self.replicated}, product='{self.product}': "
                "exchange='launches' supports neither replicas nor product 'half'"
            )
        if self.slices > LARGEST_CLUSTER:
            raise KernelError(f"{self.slices} slices: a cluster has at most {LARGEST_CLUSTER} CTAs")
        if self.tensor_cores and self.lanes < WARP:
            raise KernelError(
                f"{self.lanes} lanes with product '{self.product}': a tensor core works for a whole warp, {WARP}"
            )
        if self.replicated and self.exchange == "single":
            raise KernelError("replicated with exchange 'single': one CTA already has all units")
        if self.replicated and self.slices > 1:
            raise KernelError(f"replicated with {self.slices} slices: a CTA reads a part of the states only")
        if self.replicated and self.product != "fma":
            raise KernelError(f"replicated with product '{self.product}': expected 'fma', whose parts of sums are sent")

    @property
    def cluster(self) -> int:
        """CTAs of a thread-block cluster; 1: there are none."""
        return self.ctas if self.exchange == "cluster" else self.slices

    @property
    def through_l2(self) -> bool:
        """Whether CTAs exchange through L2."""
        return self.exchange in ("grid", "launches")

    @property
    def kind(self) -> tuple[Exchange, ProductMethod, bool]:
        """What sets it apart most from others: exchange, product and form."""
        return self.exchange, self.product, self.replicated

    @property
    def tensor_cores(self) -> bool:
        """Whether products run on them, 16 columns and 8 rows at a time."""
        return self.product != "fma"

    @property
    def needs_fallback(self) -> bool:
        """Whether a launch can find, as it runs, that it cannot give the results: another kernel follows it then."""
        return self.exchange == "grid" or self.product == "half"
