"""MoE expert weights: where each expert lies in the files of a model, reading them from there, and keeping them."""

from aio_kv.experts.arena import ExpertArena
from aio_kv.experts.arena_statistics import ArenaStatistics
from aio_kv.experts.demand import Demand, ExpertSlots
from aio_kv.experts.expert_map import ExpertMap
from aio_kv.experts.gguf_header import GgufArray, GgufShard, GgufTensor
from aio_kv.experts.gguf_index import GgufIndex
from aio_kv.experts.packed_file import PackedFile
from aio_kv.experts.posix import PosixExpertReader
from aio_kv.experts.reader import ExpertReader
from aio_kv.experts.segments import DirectSegment
from aio_kv.experts.slot_image import SlotPart

__all__ = [
    "ArenaStatistics",
    "Demand",
    "DirectSegment",
    "ExpertArena",
    "ExpertMap",
    "ExpertReader",
    "ExpertSlots",
    "GgufArray",
    "GgufIndex",
    "GgufShard",
    "GgufTensor",
    "PackedFile",
    "PosixExpertReader",
    "SlotPart",
]
