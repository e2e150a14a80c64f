"""The copy kernels without a GPU: compiled for one, cached, and run on the host."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cuda_stub import StubDriver

from aio_kv.cuda import (
    Device,
    DevicePath,
)
from aio_kv.cuda import kernels as kernels_module
from aio_kv.cuda.kernels import compile_source, prepare_kernels
from aio_kv.cuda.table import DriverTable
from aio_kv.errors import DeviceError, UnavailableError


@pytest.fixture
def stub() -> StubDriver:
    return StubDriver()


@pytest.fixture
def device(stub: StubDriver) -> Iterator[Device]:
    with Device(0, table=stub.table()) as opened:
        yield opened


SOURCE = Path(kernels_module.__file__).with_name("kernels.cu").read_text()


class TestKernels:
    @pytest.mark.slow
    @pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
    def test_compile_without_a_gpu(self, architecture: str) -> None:
        pytest.importorskip("cuda.core", reason="cuda.core is not installed: pip install 'aio_kv[cuda13]'")
        cubin = compile_source(SOURCE, architecture)
        assert cubin.startswith(b"\x7fELF")
        assert b"akv_gather" in cubin
        assert b"akv_scatter" in cubin

    def test_a_gpu_that_the_compiler_does_not_know(self) -> None:
        pytest.importorskip("cuda.core", reason="cuda.core is not installed: pip install 'aio_kv[cuda13]'")
        with pytest.raises(UnavailableError, match="cannot compile for sm_12345"):
            compile_source(SOURCE, "sm_12345")

    def test_the_cache(self, device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        compiled: list[str] = []

        def compile_now(source: str, architecture: str) -> bytes:
            compiled.append(architecture)
            return b"cubin"

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(kernels_module, "compile_source", compile_now)
        monkeypatch.setattr(kernels_module, "_compiler_version", lambda: "13.0")
        for _ in range(2):
            assert kernels_module.compile_kernels(device) == b"cubin"
        assert compiled == ["sm_90"]
        (kept,) = (tmp_path / "aio_kv").iterdir()
        for damage in (b"", b"cubin", kept.read_bytes()[:-1], kept.read_bytes() + b"x"):
            kept.write_bytes(damage)
            assert kernels_module.compile_kernels(device) == b"cubin"
        assert len(compiled) == 5
        monkeypatch.setattr(kernels_module, "_compiler_version", lambda: "13.1")
        kernels_module.compile_kernels(device)
        assert len(compiled) == 6
        assert len(list((tmp_path / "aio_kv").iterdir())) == 2
        monkeypatch.setenv("XDG_CACHE_HOME", str(kept))  # a file: no folder can be made there
        assert kernels_module.compile_kernels(device) == b"cubin"

    def test_without_a_compiler_the_reason_is_kept(
        self, stub: StubDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
        with Device(table=DriverTable(stub.lookup)) as device, DevicePath(device) as path:
            assert path.kernels is None
            assert "NVRTC is not installed" in path.kernels_refusal
            assert path.fields()["gather"] == path.fields()["scatter"] == 0

    def test_a_driver_that_refuses_them(self, stub: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels_module, "compile_kernels", lambda device: b"cubin")
        device = Device(table=DriverTable(stub.lookup))
        stub.codes["cuModuleLoadData"] = 209
        found, reason = prepare_kernels(device)
        assert found is None
        assert "cuModuleLoadData failed" in reason
        stub.codes = {"cuLaunchKernel": 700}
        with pytest.raises(DeviceError, match="lost to an earlier error: cuLaunchKernel"):
            prepare_kernels(device)

    @pytest.mark.slow
    @pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
    def test_every_byte_on_the_host(self, tmp_path: Path) -> None:
        """The kernel itself, compiled for the host with memory access and shuffles replaced."""
        start, end = SOURCE.index("/* Loads leave"), SOURCE.index("/* A full piece")
        assert re.search(r"\bload\(const uint4", SOURCE[start:end])
        program = HOST_BEFORE + SOURCE[:start] + HOST_ACCESS + SOURCE[end:] + HOST_AFTER
        (tmp_path / "kernel.cpp").write_text(program)
        build = ["c++", "-O1", "-w", str(tmp_path / "kernel.cpp"), "-o", str(tmp_path / "kernel")]
        subprocess.run(build, check=True, timeout=60)
        done = subprocess.run([tmp_path / "kernel"], check=False, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout


# One lane after the other, twice: first to learn what each lane tells the others, then to copy.
HOST_BEFORE = """
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>
struct uint4 { unsigned x, y, z, w; };
static struct { unsigned x; } threadIdx, blockIdx, gridDim, blockDim;
static std::vector<unsigned long long> told[32];
static size_t told_at;
static bool is_told;
template <class T> T __shfl_sync(unsigned, T value, unsigned lane)
{
    if (is_told)
        return told[lane][told_at++];
    told[threadIdx.x % 32].push_back(value);
    return 0;
}
template <class T> T __ldg(const T *from) { return *from; }
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads, blocks)
"""
HOST_ACCESS = """
template <class T> static void check(const T *at) { if ((u64)at % sizeof(T)) { puts("misaligned"); exit(1); } }
template <class T> static T load(const T *from) { check(from); return *from; }
template <class T> static void store(T *to, T value) { check(to); *to = value; }
"""
HOST_AFTER = """
typedef std::vector<unsigned char> bytes;
static void launch(const std::vector<akv_kernel_copy> &list, bool is_gather)
{
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
        for (unsigned warp = 0; warp < blockDim.x / 32; warp++) {
            for (auto &values : told) values.clear();
            for (int pass = 0; pass < 2; pass++)
                for (unsigned lane = 0; lane < 32; lane++) {
                    is_told = pass, told_at = 0, threadIdx.x = warp * 32 + lane;
                    is_gather ? akv_gather(list.data(), list.size()) : akv_scatter(list.data(), list.size());
                }
        }
}
int main()
{
    static const size_t sizes[] = {0, 1, 3, 15, 16, 17, 31, 33, 511, 512, 513, 4095, 4096, 4097, 12293, 32768};
    std::mt19937 random(7);
    for (int round = 0; round < 90; round++) {
        gridDim.x = 1 + random() % 5, blockDim.x = 32 * (1 + random() % 4);
        const size_t count = round < 40 ? round : random() % (round % 9 ? 200 : 1500);
        std::vector<size_t> from(count), to(count), nbytes(count);
        size_t source_end = 64, target_end = 64;
        for (size_t i = 0; i < count; i++) {
            nbytes[i] = round % 3 ? sizes[random() % 16] : 4096;
            const size_t alignment = 1 << random() % 5;
            from[i] = (source_end / 16 + 1) * 16 + (round % 3 == 1 ? random() % 16 : 0) / alignment * alignment;
            to[i] = (target_end / 16 + 1) * 16 + (round % 3 == 2 ? random() % 16 : 0) / alignment * alignment;
            source_end = from[i] + nbytes[i], target_end = to[i] + nbytes[i];
        }
        bytes source(source_end + 64), target(target_end + 64, 0xEE), wanted(target);
        for (auto &byte : source) byte = random();
        std::vector<akv_kernel_copy> list(count);
        for (size_t i = 0; i < count; i++) {
            list[i] = {(u64)&target[to[i]], (u64)&source[from[i]], nbytes[i]};
            memcpy(&wanted[to[i]], &source[from[i]], nbytes[i]);
        }
        launch(list, round % 2);
        if (target != wanted) return printf("round %d differs\\n", round), 1;
    }
}
"""
