"""Quantising to Q4_K and Q6_K, which the gguf package reads but does not write.

Plain rounding to the nearest step, no search for better scales as llama.cpp does: the blocks are sound and near the
numbers they stand for, which is what test models need. Source of the layouts: `block_q4_K` and `block_q6_K` in
`ggml-common.h`; the tests turn blocks back with the gguf package.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["quantize_q4_k", "quantize_q6_k"]

_BLOCK = 256


def quantize_q4_k(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return `numbers`, (rows, columns) with columns a multiple of 256, as (rows, columns / 256 * 144) bytes.

    A block has 8 parts of 32 numbers: x = d * scale * q - dmin * least, q of 4 bits, scale and least of 6.
    """
    parts = numbers.reshape(-1, 8, 32)
    least = np.maximum(0, -parts.min(axis=2))
    step = (parts.max(axis=2).clip(min=0) + least) / 15
    d, scale = _shared_factor(step, 63)
    dmin, offset = _shared_factor(least, 63)
    steps = _as_float(d) * scale
    shifted = parts + (_as_float(dmin) * offset)[:, :, None]
    q = np.rint(_divided(shifted, steps[:, :, None])).clip(0, 15).astype(np.uint8)
    q = q.reshape(-1, 4, 2, 32)
    packed = (q[:, :, 0] | q[:, :, 1] << 4).reshape(-1, 128)
    blocks = np.concatenate([_bytes_of(d), _bytes_of(dmin), _six_bits(scale, offset), packed], axis=1)
    return blocks.reshape(len(numbers), -1)


def quantize_q6_k(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return `numbers`, (rows, columns) with columns a multiple of 256, as (rows, columns / 256 * 210) bytes.

    A block has 16 parts of 16 numbers: x = d * scale * (q - 32), q of 6 bits, scale of 8 with a sign.
    """
    parts = numbers.reshape(-1, 16, 16)
    d, scale = _shared_factor(np.abs(parts).max(axis=2) / 31, 127)
    steps = _as_float(d) * scale
    q = (np.rint(_divided(parts, steps[:, :, None])).clip(-32, 31) + 32).astype(np.uint8)
    quarters = q.reshape(-1, 2, 4, 32)
    low, high = quarters & 15, quarters >> 4
    ql = np.stack([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], axis=2)
    qh = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    blocks = np.concatenate(
        [ql.reshape(-1, 128), qh.reshape(-1, 64), scale.astype(np.uint8), _bytes_of(d)], axis=1
    )
    return blocks.reshape(len(numbers), -1)


def _shared_factor(steps: NDArray[np.float32], most: int) -> tuple[NDArray[np.float16], NDArray[Any]]:
    """Return one factor per block and a whole number up to `most` per part, whose product is near `steps`."""
    factor = (steps.max(axis=1) / most).astype(np.float16)
    return factor, np.rint(_divided(steps, _as_float(factor))).clip(0, most).astype(np.uint8)


def _six_bits(scale: NDArray[Any], least: NDArray[Any]) -> NDArray[np.uint8]:
    first = scale[:, :4] | scale[:, 4:] >> 4 << 6
    second = least[:, :4] | least[:, 4:] >> 4 << 6
    third = scale[:, 4:] & 15 | (least[:, 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=1)


def _as_float(factor: NDArray[np.float16]) -> NDArray[np.float32]:
    return factor.astype(np.float32)[:, None]


def _bytes_of(factor: NDArray[np.float16]) -> NDArray[np.uint8]:
    return factor.astype("<f2")[:, None].view(np.uint8)


def _divided(numbers: NDArray[np.float32], steps: NDArray[np.float32]) -> NDArray[np.float32]:
    """Divide; where there is no step, all numbers are zero."""
    return np.divide(numbers, steps, out=np.zeros_like(numbers), where=steps > 0)
