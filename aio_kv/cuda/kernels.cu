/* Copies many small runs of bytes in one launch: gather from pinned host memory to the device, scatter back.
 *
 * A read of host memory takes a microsecond or two to come back over PCIe, so what counts is how many are under way. A
 * warp takes one entry of the list at a time and each of its lanes keeps 8 loads of 16 bytes in flight: one 4 KiB
 * group is wholly under way at once, and 32 blocks of 256 threads have 1 MiB under way.
 *
 * The list itself lies in host memory too. Each lane fetches the entry of one of the warp's next 32 rounds, so the warp
 * waits for the list once in 32 entries, and fetches the following 32 before it begins to copy these.
 *
 * Any address and any length is right. The widest access that both addresses allow is used; what is left at the end of
 * a run goes byte by byte. Runs of one list must not overlap. Blocks have a multiple of 32 threads, 512 at most.
 */

typedef unsigned long long u64;

struct akv_kernel_copy {
    u64 target;
    u64 source;
    u64 nbytes;
};

#define WARP 32u
#define ALL_LANES 0xffffffffu
#define IN_FLIGHT 8u
/* The most threads of a block, and that one block per multiprocessor is enough: no registers are saved for a second. */
#define KERNEL_BOUNDS __launch_bounds__(512, 1)

/* Loads leave no trace in L1: nothing is read twice. They are plain loads on purpose: non-coherent ones (ld.global.nc)
 * may be moved behind the stores of the same piece, and the assembler does that, down to one or two in flight. */
#define DEFINE_ACCESS(type, suffix, constraint)                                                                        \
    static __device__ __forceinline__ type load(const type *source)                                                    \
    {                                                                                                                  \
        type v;                                                                                                        \
        asm volatile("ld.global.L1::no_allocate." suffix " %0, [%1];" : "=" constraint(v) : "l"(source));           \
        return v;                                                                                                      \
    }                                                                                                                  \
    static __device__ __forceinline__ void store(type *target, type v)                                                 \
    {                                                                                                                  \
        asm volatile("st.global." suffix " [%0], %1;" : : "l"(target), constraint(v) : "memory");                      \
    }

DEFINE_ACCESS(u64, "u64", "l")
DEFINE_ACCESS(unsigned int, "u32", "r")
DEFINE_ACCESS(unsigned short, "u16", "h")

static __device__ __forceinline__ uint4 load(const uint4 *source)
{
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(source));
    return v;
}

static __device__ __forceinline__ void store(uint4 *target, uint4 v)
{
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(target), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

/* PTX has no registers of 8 bits. */
static __device__ __forceinline__ unsigned char load(const unsigned char *source)
{
    unsigned int v;
    asm volatile("ld.global.L1::no_allocate.u8 %0, [%1];" : "=r"(v) : "l"(source));
    return (unsigned char)v;
}

static __device__ __forceinline__ void store(unsigned char *target, unsigned char v)
{
    asm volatile("st.global.u8 [%0], %1;" : : "l"(target), "r"((unsigned int)v) : "memory");
}

/* A full piece: IN_FLIGHT elements for each lane of a warp, every load issued before the first store. */
template <class T> static __device__ __forceinline__ void copy_piece(T *target, const T *source, unsigned int lane)
{
    T held[IN_FLIGHT];
#pragma unroll
    for (unsigned int i = 0; i < IN_FLIGHT; i++)
        held[i] = load(source + i * WARP + lane);
#pragma unroll
    for (unsigned int i = 0; i < IN_FLIGHT; i++)
        store(target + i * WARP + lane, held[i]);
}

/* The last piece of a run, which holds `count` elements. */
template <class T>
static __device__ __forceinline__ void copy_rest(T *target, const T *source, unsigned int count, unsigned int lane)
{
    T held[IN_FLIGHT];
#pragma unroll
    for (unsigned int i = 0; i < IN_FLIGHT; i++) {
        held[i] = T(); /* says that no value survives from before, which would cost registers */
        if (i * WARP + lane < count)
            held[i] = load(source + i * WARP + lane);
    }
#pragma unroll
    for (unsigned int i = 0; i < IN_FLIGHT; i++)
        if (i * WARP + lane < count)
            store(target + i * WARP + lane, held[i]);
}

/* The share of one warp, `part` of `parts`, in a run: whole elements of T, then the bytes that are left. */
template <class T>
static __device__ __forceinline__ void copy_run(const akv_kernel_copy &copy, unsigned int part, unsigned int parts,
                                                unsigned int lane)
{
    const u64 piece = IN_FLIGHT * WARP;
    const u64 count = copy.nbytes / sizeof(T);
    for (u64 first = part * piece; first < count; first += parts * piece)
        if (count - first >= piece)
            copy_piece((T *)copy.target + first, (const T *)copy.source + first, lane);
        else
            copy_rest((T *)copy.target + first, (const T *)copy.source + first, count - first, lane);
    const u64 left = copy.nbytes % sizeof(T);
    if (part == 0 && lane < left) {
        const u64 at = count * sizeof(T) + lane;
        store((unsigned char *)copy.target + at, load((const unsigned char *)copy.source + at));
    }
}

static __device__ __forceinline__ void copy_any(const akv_kernel_copy &copy, unsigned int part, unsigned int parts,
                                                unsigned int lane)
{
    const u64 misaligned = copy.target | copy.source;
    if (misaligned % 16 == 0)
        copy_run<uint4>(copy, part, parts, lane);
    else if (misaligned % 8 == 0)
        copy_run<u64>(copy, part, parts, lane);
    else if (misaligned % 4 == 0)
        copy_run<unsigned int>(copy, part, parts, lane);
    else if (misaligned % 2 == 0)
        copy_run<unsigned short>(copy, part, parts, lane);
    else
        copy_run<unsigned char>(copy, part, parts, lane);
}

/* Fetches one entry, or an empty one where the list has ended. */
static __device__ __forceinline__ akv_kernel_copy fetch(const akv_kernel_copy *list, unsigned int count, u64 index)
{
    akv_kernel_copy copy = {0, 0, 0};
    if (index < count) {
        const u64 *entry = (const u64 *)(list + index);
        copy.target = __ldg(entry);
        copy.source = __ldg(entry + 1);
        copy.nbytes = __ldg(entry + 2);
    }
    return copy;
}

static __device__ __forceinline__ akv_kernel_copy from_lane(const akv_kernel_copy &copy, unsigned int lane)
{
    akv_kernel_copy told;
    told.target = __shfl_sync(ALL_LANES, copy.target, lane);
    told.source = __shfl_sync(ALL_LANES, copy.source, lane);
    told.nbytes = __shfl_sync(ALL_LANES, copy.nbytes, lane);
    return told;
}

/* Short lists leave warps without an entry of their own: then `parts` warps share each one. Neighbouring warps work on
 * neighbouring entries, so that the copies of all of them stay within a few pages. */
static __device__ __forceinline__ void copy_list(const akv_kernel_copy *list, unsigned int count)
{
    if (count == 0)
        return;
    const unsigned int lane = threadIdx.x % WARP;
    const unsigned int warps = gridDim.x * (blockDim.x / WARP);
    /* Consecutive warps go to different blocks: a short list is spread over all multiprocessors. */
    const unsigned int warp = blockIdx.x + gridDim.x * (threadIdx.x / WARP);
    const unsigned int parts = count < warps ? warps / count : 1;
    const unsigned int teams = warps / parts;
    const unsigned int team = warp % teams;
    const unsigned int part = warp / teams;
    if (part >= parts)
        return; /* the remainder of the division has nothing to do */
    akv_kernel_copy next = fetch(list, count, team + (u64)lane * teams);
    for (u64 first = team; first < count; first += (u64)WARP * teams) {
        const akv_kernel_copy mine = next;
        next = fetch(list, count, first + ((u64)WARP + lane) * teams);
        for (unsigned int i = 0; i < WARP && first + (u64)i * teams < count; i++)
            copy_any(from_lane(mine, i), part, parts, lane);
    }
}

extern "C" __global__ void KERNEL_BOUNDS akv_gather(const akv_kernel_copy *list, unsigned int count)
{
    copy_list(list, count);
}

/* The host sees what was written once the launch is known to have ended. */
extern "C" __global__ void KERNEL_BOUNDS akv_scatter(const akv_kernel_copy *list, unsigned int count)
{
    copy_list(list, count);
}
