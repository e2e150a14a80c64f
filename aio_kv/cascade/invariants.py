"""What must be true of a `SlotCache` between any two calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aio_kv.cascade.states import SlotState

if TYPE_CHECKING:
    from aio_kv.cascade.slot_cache import SlotCache

__all__ = ["check_book"]

_FREE, _FILLING, _CLEAN, _DIRTY, _FLUSHING = (int(state) for state in SlotState)
_NEVER = np.iinfo(np.int64).max


def check_book(cache: SlotCache) -> None:
    """Raise AssertionError if the book contradicts itself; it looks at everything."""
    state, leases, fills, keys = cache._state, cache._leases, cache._fills, cache._key_of
    has_key = keys >= 0
    assert (leases >= 0).all()
    assert (fills >= 0).all()
    assert ((fills > 0) == (state == _FILLING)).all()
    attached = np.flatnonzero(has_key)
    assert (cache._slot_of[keys[attached]] == attached + 1).all()
    assert np.count_nonzero(cache._slot_of) == len(attached)
    is_free = state == _FREE
    assert sorted(cache._free) == np.flatnonzero(is_free).tolist()
    assert not (is_free & (has_key | (leases > 0) | cache._valid.any(axis=1))).any()
    assert ((state != _FLUSHING) | (leases > 0)).all()
    assert ((state != _DIRTY) | (has_key & cache._dirty.any(axis=1))).all()
    assert not (cache._dirty & ~cache._valid).any()
    assert not ((state == _CLEAN) & cache._dirty.any(axis=1)).any()
    # A detached slot is there for somebody who still reads it.
    assert not (~has_key & ~is_free & (leases == 0)).any()
    assert cache._detached == np.count_nonzero(~has_key & ~is_free)
    takeable = has_key & (state == _CLEAN) & (leases == 0)
    assert (takeable == (cache._takeable == 1)).all()
    has_since = cache._dirty_since != _NEVER
    assert cache._dirty_count == np.count_nonzero(has_since)
    assert (has_since | ~cache._dirty.any(axis=1) | (state == _FILLING)).all()
    assert not (cache._has_failed & (state != _DIRTY) & (state != _FILLING)).any()
    is_due = (state == _DIRTY) & ~cache._has_failed
    assert (is_due == (cache._flushable == 1)).all()
    assert cache._dirty_order.contains(np.flatnonzero(state == _DIRTY)).all()
    assert sorted(cache._policy.residents()) == attached.tolist()
