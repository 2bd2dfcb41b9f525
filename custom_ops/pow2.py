"""Powers of two beside a number."""

from __future__ import annotations


def round_up_pow2(number: int) -> int:
    """Return the smallest power of two that is at least `number`; 1 for numbers below 1."""
    return 1 << max(number - 1, 0).bit_length()


def round_down_pow2(number: int) -> int:
    """Return the largest power of two that is at most `number`, which is 1 or more."""
    return int(1 << (number.bit_length() - 1))
