"""Numbers of TensorFlow's stateless random ops, in NumPy: the definition of a program's `random`.

The generator is Philox 4x32-10 (J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3",
SC 2011): a key of 64 bits and a counter of 128 give four words of 32 bits. A tensor is filled in groups: the numbers
4g to 4g + 3 are those of the counter plus g, a word each; of 8 bytes two numbers are, of two words each. CPUs and GPUs
have the same numbers.
"""

from __future__ import annotations

import numpy as np

from custom_ops.expr.table_entry import Array

ROUNDS = 10
FACTORS = (0xD2511F53, 0xCD9E8D57)
STEPS = (0x9E3779B9, 0xBB67AE85)  # of the key, from round to round
SCRAMBLE = 0x02461E293EC8F720  # the key with which seeds become keys and counters
MANTISSA = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}  # bits
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def group_size(dtype: str) -> int:
    """How many numbers of a dtype one counter gives."""
    return 2 if dtype in ("float64", "int64") else 4


def philox(key: int, counter: tuple[int, int], groups: Array) -> list[Array]:
    """The four words of each of `groups`, which are added to the counter; its lower half is first."""
    low = np.uint64(counter[0]) + groups.astype(np.uint64)
    high = np.uint64(counter[1]) + (low < np.uint64(counter[0])).astype(np.uint64)
    words = [low & _LOW, low >> _HALF, high & _LOW, high >> _HALF]
    keys = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(ROUNDS):
        first, second = words[0] * np.uint64(FACTORS[0]), words[2] * np.uint64(FACTORS[1])
        words = [
            second >> _HALF ^ words[1] ^ np.uint64(keys[0]),
            second & _LOW,
            first >> _HALF ^ words[3] ^ np.uint64(keys[1]),
            first & _LOW,
        ]
        keys = [(part + step) & 0xFFFFFFFF for part, step in zip(keys, STEPS, strict=True)]
    return words


def seeded(seed: Array) -> tuple[Array, Array]:
    """The key and the counter of a seed of two int64 numbers, as TensorFlow scrambles them (GenerateKey in
    stateless_random_ops.cc): a generator whose counter is the seed gives four words, half of them for each."""
    low, high = (int(number) & 0xFFFFFFFFFFFFFFFF for number in seed.reshape(-1))
    words = [int(word[0]) for word in philox(SCRAMBLE, (low, high), np.zeros(1, np.int64))]
    key, counter = words[0] | words[1] << 32, words[2] | words[3] << 32
    return np.array([key], np.uint64), np.array([0, counter], np.uint64)


def draw(dtype: str, key: Array, counter: Array, numbers: Array) -> Array:
    """The generator's numbers of these positions: uniform in [0, 1), of half types as float32; all bits of integers.

    Args:
        dtype: of programs, but for bool.
        key: `[1]` uint64.
        counter: `[2]` uint64, the lower half first.
        numbers: positions in the tensor that TensorFlow would fill, flat.
    """
    size = group_size(dtype)
    low, high = map(int, counter.reshape(-1))
    words = np.stack(philox(int(key.reshape(-1)[0]), (low, high), numbers // size))
    lane = numbers % size

    def word(place: Array) -> Array:
        return np.take_along_axis(words, place[np.newaxis], 0)[0]

    if size == 4:
        bits = word(lane)
    elif dtype == "int64":
        bits = word(2 * lane + 1) << _HALF | word(2 * lane)
    else:
        bits = word(2 * lane) << _HALF | word(2 * lane + 1)
    if dtype.startswith("int"):
        return bits.astype(np.uint32 if size == 4 else np.uint64).view(dtype)
    mantissa = MANTISSA[dtype]
    fraction = (bits & np.uint64((1 << mantissa) - 1)).astype(np.float64) * 2.0**-mantissa
    return fraction if dtype == "float64" else fraction.astype(np.float32)
