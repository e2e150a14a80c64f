"""Questions about arrays of booleans. They hold one byte each, and Python searches bytes without what a reduction of
NumPy does before it begins: for a few flags that is most of its time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["every", "some"]


def every(flags: NDArray[np.bool_]) -> bool:
    """Whether all are true; of none they are."""
    return 0 not in flags.tobytes()


def some(flags: NDArray[np.bool_]) -> bool:
    """Whether one is true."""
    return 1 in flags.tobytes()
