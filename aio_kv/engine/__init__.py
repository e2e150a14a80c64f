"""The engine: batches of I/O in, finished tickets out. Knows no event loop; any thread may use it.

`Engine` is the native one (io_uring, or native threads); `PythonEngine` is the same interface on a pool of Python
threads, for installations without the compiled extension. Only this package touches cffi.
"""

from aio_kv.engine.batch import CUDA_ERROR, Batch, Kind, Order, Ticket
from aio_kv.engine.extension import extension_error, has_extension
from aio_kv.engine.interface import IoEngine
from aio_kv.engine.native import Engine
from aio_kv.engine.options import Fault, FaultAction
from aio_kv.engine.python import PythonEngine
from aio_kv.engine.statistics import EngineStatistics, RingInfo

__all__ = [
    "CUDA_ERROR",
    "Batch",
    "Engine",
    "EngineStatistics",
    "Fault",
    "FaultAction",
    "IoEngine",
    "Kind",
    "Order",
    "PythonEngine",
    "RingInfo",
    "Ticket",
    "extension_error",
    "has_extension",
]
