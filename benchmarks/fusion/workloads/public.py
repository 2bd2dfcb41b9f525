"""Training steps of public models that `benchmarks.fusion.coverage --public` tells about; see the three modules."""

from __future__ import annotations

from functools import partial

from benchmarks.fusion.workloads import public_images, public_others, public_text

WORKLOADS = {**public_text.WORKLOADS, **public_images.WORKLOADS, **public_others.WORKLOADS}


def source(name: str) -> str:
    """What a model was written after."""
    make = WORKLOADS[name]
    if isinstance(make, partial):
        return f"keras.applications.{public_images.APPLICATIONS[name][0]}"
    return (make.__doc__ or "").strip()
