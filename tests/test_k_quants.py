"""Our Q4_K and Q6_K blocks are what the gguf package takes them for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aio_kv.cli.k_quants import quantize_q4_k, quantize_q6_k

gguf = pytest.importorskip("gguf")

Quantize = Callable[[Any], Any]


# A step of 4 bits is a fifteenth of the range of 32 normal numbers; one of 6 bits a sixty-third of that of 16.
@pytest.mark.parametrize(
    ("name", "quantize", "most"), [("Q4_K", quantize_q4_k, 0.1), ("Q6_K", quantize_q6_k, 0.025)]
)
@given(seed=st.integers(0, 1000), scale=st.sampled_from([1e-3, 1, 100]), shift=st.sampled_from([-2, 0, 0.5]))
def test_numbers_come_back(
    name: str, quantize: Quantize, most: float, seed: int, scale: float, shift: float
) -> None:
    kind = gguf.GGMLQuantizationType[name]
    numbers = ((np.random.default_rng(seed).standard_normal((3, 512)) + shift) * scale).astype(np.float32)
    blocks = quantize(numbers)
    assert blocks.shape == gguf.quant_shape_to_byte_shape(numbers.shape, kind)
    back = gguf.dequantize(blocks, kind)
    error = np.sqrt(np.mean((back - numbers) ** 2) / np.mean(numbers**2))
    assert error < most


@pytest.mark.parametrize(("name", "quantize"), [("Q4_K", quantize_q4_k), ("Q6_K", quantize_q6_k)])
def test_zeros_stay_zeros(name: str, quantize: Quantize) -> None:
    blocks = quantize(np.zeros((1, 256), np.float32))
    assert not gguf.dequantize(blocks, gguf.GGMLQuantizationType[name]).any()
