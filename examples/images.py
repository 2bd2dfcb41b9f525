"""Real labelled images from scikit-learn; nothing is downloaded.
The same seed gives the same images."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from sklearn import datasets

Batch = tuple[np.ndarray, np.ndarray]


def digits(count: int, image_size: int, seed: int = 0) -> Batch:
    """Handwritten digits (8 x 8, ten classes), enlarged by linear interpolation.

    Args:
        count: number of images; drawn without repeats as long as the set (1,797) lasts.
        image_size: height and width, in pixels.
        seed: which images, and in which order.

    Returns:
        float32 images [count, image_size, image_size, 3] in [-1, 1] and int32 labels [count].
    """
    data = datasets.load_digits()
    order = _order(len(data.images), count, seed)
    small = data.images[order].astype(np.float32) / 8 - 1  # the set's grey levels are 0..16
    weights = _interpolation(small.shape[1], image_size)
    large = weights @ small @ weights.T
    return np.repeat(large[..., None], 3, axis=-1), data.target[order].astype(np.int32)


def photographs(count: int, image_size: int, seed: int = 0) -> Batch:
    """Patches of two colour photographs; the label says which photograph and which half of it.

    Args:
        count: number of patches.
        image_size: height and width, in pixels; at most half a photograph's width (320).
        seed: where the patches are cut.

    Returns:
        float32 images [count, image_size, image_size, 3] in [-1, 1] and int32 labels [count], 0..3.

    Raises:
        ValueError: the patches are larger than half a photograph.
    """
    photos = datasets.load_sample_images().images
    limit = min(min(photo.shape[0], photo.shape[1] // 2) for photo in photos)
    if image_size > limit:
        raise ValueError(f"photographs can be cut to {limit} pixels at most, not {image_size}")
    random = np.random.default_rng(seed)
    images = np.empty((count, image_size, image_size, 3), np.float32)
    labels = random.integers(2 * len(photos), size=count).astype(np.int32)
    for image, label in zip(images, labels, strict=True):
        photo, half = photos[label // 2], photos[label // 2].shape[1] // 2
        top = random.integers(photo.shape[0] - image_size + 1)
        left = (label % 2) * half + random.integers(half - image_size + 1)
        image[:] = photo[top : top + image_size, left : left + image_size]
    return images / 127.5 - 1, labels


SOURCES: dict[str, Callable[[int, int, int], Batch]] = {
    "digits": digits,
    "photographs": photographs,
}


def batches(source: str, batch: int, image_size: int, steps: int, seed: int = 0) -> Iterator[Batch]:
    """`steps` batches of `batch` images each; see `digits` and `photographs` for the arrays.

    Raises:
        ValueError: the source is unknown.
    """
    if source not in SOURCES:
        raise ValueError(f"unknown images '{source}'; expected one of {', '.join(SOURCES)}")
    for step in range(steps):
        yield SOURCES[source](batch, image_size, seed + step)


def _order(available: int, count: int, seed: int) -> np.ndarray:
    """`count` indices below `available`: whole shuffles of the set, one after the other."""
    random = np.random.default_rng(seed)
    rounds = -(-count // available)
    return np.concatenate([random.permutation(available) for _ in range(rounds)])[:count]


def _interpolation(source: int, target: int) -> np.ndarray:
    """The matrix [target, source] of linear interpolation between pixel centres, edges repeated."""
    centres = np.clip((np.arange(target) + 0.5) * source / target - 0.5, 0, source - 1)
    left = np.minimum(centres.astype(int), source - 2)
    weights = np.zeros((target, source), np.float32)
    weights[np.arange(target), left] = 1 - (centres - left)
    weights[np.arange(target), left + 1] = centres - left
    return weights
