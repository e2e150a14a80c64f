"""Transfers: what an async backend hands out, how they are ordered and fed to an engine, and how loops await them."""

from aio_kv.transfer.binding import LoopBinding
from aio_kv.transfer.dispatcher import Dispatcher
from aio_kv.transfer.loops import current_binding
from aio_kv.transfer.region import LandingRegion
from aio_kv.transfer.report import Outcome, TransferReport
from aio_kv.transfer.transfer import Transfer

__all__ = [
    "Dispatcher",
    "LandingRegion",
    "LoopBinding",
    "Outcome",
    "Transfer",
    "TransferReport",
    "current_binding",
]
