/* memory.c: device memory, which is host memory under another address; pinned and registered host memory; and what a
 * pointer is.
 *
 * Unless a test asks for plain addresses, the device's addresses carry a tag: memcpy on one kills the process, as it
 * would with a real device pointer, and a kernel that is given the host address of registered memory faults, as it may
 * where CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM is 0. */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "fake.h"

#define DEVICE_TAG (1ull << 60)
#define REGISTERED_TAG (1ull << 61)
#define ADDRESS_MAX (1ull << 62)
enum { PAGE = 4096, POISON = 0xcb };

static struct region *regions;
static uint32_t region_count, region_room;
static uint32_t region_last; /* found last time: lists name the same region again and again */

static bool overlaps(uint64_t base, uint64_t size, uint64_t address, uint64_t nbytes)
{
    return address < base + size && base < address + (nbytes ? nbytes : 1);
}

static bool contains(uint64_t base, uint64_t size, uint64_t address, uint64_t nbytes)
{
    return address >= base && nbytes <= size && address - base <= size - nbytes;
}

static bool known_to_host(const struct region *r)
{
    return r->kind != REGION_DEVICE;
}

/* The region that `address` points into, by either of its addresses. */
static struct region *region_at(uint64_t address)
{
    for (uint32_t i = 0; i < region_count; i++) {
        struct region *r = &regions[(region_last + i) % region_count];
        if (overlaps(r->device, r->nbytes, address, 1) ||
            (known_to_host(r) && overlaps((uint64_t)r->host, r->nbytes, address, 1))) {
            region_last = (uint32_t)(r - regions);
            return r;
        }
    }
    return NULL;
}

static uint8_t *region_bytes(const struct region *r, uint64_t address, uint64_t nbytes)
{
    if (contains(r->device, r->nbytes, address, nbytes))
        return r->host + (address - r->device);
    if (known_to_host(r) && contains((uint64_t)r->host, r->nbytes, address, nbytes))
        return (uint8_t *)address;
    return NULL;
}

static bool is_mapped(uint64_t address, uint64_t nbytes)
{
    uint64_t first = address & ~(uint64_t)(PAGE - 1);
    uint64_t end = (address + nbytes + PAGE - 1) & ~(uint64_t)(PAGE - 1);
    return end > first && msync((void *)first, end - first, MS_ASYNC) == 0;
}

/* What lies at `address`: one region, or pageable memory. A range that leaves its region is refused, as the driver
 * does, even when the neighbour is registered too. */
CUresult fake_place(uint64_t address, uint64_t nbytes, struct place *out)
{
    if (!address || address > ADDRESS_MAX || nbytes > ADDRESS_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    struct region *r = region_at(address);
    if (r) {
        out->region = r->serial;
        out->kind = r->kind;
        out->host = region_bytes(r, address, nbytes);
        return out->host ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
    for (uint32_t i = 0; i < region_count; i++)
        if (overlaps((uint64_t)regions[i].host, regions[i].nbytes, address, nbytes))
            return CUDA_ERROR_INVALID_VALUE;
    *out = (struct place){.host = (uint8_t *)address};
    return is_mapped(address, nbytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* When the work is carried out: is the memory that was named still there? */
uint8_t *fake_place_bytes(const struct place *place)
{
    if (!place->region)
        return place->host;
    for (uint32_t i = 0; i < region_count; i++)
        if (regions[(region_last + i) % region_count].serial == place->region)
            return place->host;
    return NULL;
}

/* What a kernel finds at an address. It has no other view of memory than the device's. */
uint8_t *fake_kernel_bytes(uint64_t address, uint64_t nbytes)
{
    struct region *r = region_at(address);
    return r && contains(r->device, r->nbytes, address, nbytes) ? r->host + (address - r->device) : NULL;
}

int64_t fake_regions_live(enum region_kind kind)
{
    int64_t count = 0;
    for (uint32_t i = 0; i < region_count; i++)
        count += regions[i].kind == kind;
    return count;
}

static uint64_t rounded(uint64_t nbytes)
{
    return (nbytes + PAGE - 1) / PAGE * PAGE;
}

static void region_free(struct region *r)
{
    if (r->kind == REGION_DEVICE)
        fake.device_nbytes -= r->nbytes;
    else
        fake.pinned_nbytes -= r->nbytes;
    if (r->kind != REGION_REGISTERED)
        munmap(r->host, rounded(r->nbytes));
    *r = regions[--region_count];
    region_last = 0;
}

void fake_regions_reset(void)
{
    while (region_count)
        region_free(&regions[region_count - 1]);
}

static struct region *region_add(enum region_kind kind, void *host, uint64_t nbytes, unsigned flags)
{
    if (region_count == region_room) {
        region_room = region_room ? 2 * region_room : 64;
        regions = realloc(regions, region_room * sizeof *regions);
        if (!regions)
            abort();
    }
    uint64_t tag = kind == REGION_DEVICE ? DEVICE_TAG : kind == REGION_REGISTERED ? REGISTERED_TAG : 0;
    struct region *r = &regions[region_count++];
    *r = (struct region){.serial = ++fake.region_serials, .kind = kind, .flags = flags, .host = host,
                         .device = (uint64_t)host + (fake.plain_addresses ? 0 : tag), .nbytes = nbytes,
                         .context = fake_current()};
    if (kind == REGION_DEVICE)
        fake.device_nbytes += nbytes;
    else
        fake.pinned_nbytes += nbytes;
    return r;
}

static bool exceeds(uint64_t limit, uint64_t used, uint64_t nbytes)
{
    return limit && (nbytes > limit || used > limit - nbytes);
}

/* Fresh memory holds neither zeros nor anything that was there before. */
static struct region *region_map(enum region_kind kind, uint64_t nbytes, unsigned flags)
{
    void *host = mmap(NULL, rounded(nbytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (host == MAP_FAILED)
        return NULL;
    memset(host, POISON, nbytes);
    return region_add(kind, host, nbytes, flags);
}

static CUresult mem_alloc(CUdeviceptr *out, size_t nbytes)
{
    if (!out || nbytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (exceeds(fake.device_limit, fake.device_nbytes, nbytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct region *r = region_map(REGION_DEVICE, nbytes, 0);
    *out = r ? r->device : 0;
    return r ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t nbytes)
{
    ENTRY(cuMemAlloc, NULL, mem_alloc(out, nbytes));
}

static struct region *region_starting_at(enum region_kind kind, uint64_t address)
{
    struct region *r = region_at(address);
    bool starts = r && r->kind == kind && address == (kind == REGION_DEVICE ? r->device : (uint64_t)r->host);
    return starts ? r : NULL;
}

/* Freeing waits for the whole context, as the driver does: nothing in flight can name the memory afterwards. The
 * region is looked up again, because the wait lets other threads in. */
static CUresult mem_free(enum region_kind kind, uint64_t address)
{
    struct region *r = region_starting_at(kind, address);
    if (!r)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult code = fake_force_context(r->context);
    if (code)
        return code;
    r = region_starting_at(kind, address);
    if (!r)
        return CUDA_ERROR_INVALID_VALUE;
    region_free(r);
    return CUDA_SUCCESS;
}

API CUresult cuMemFree_v2(CUdeviceptr address)
{
    ENTRY(cuMemFree, NULL, address ? mem_free(REGION_DEVICE, address) : CUDA_SUCCESS);
}

static CUresult mem_host_alloc(void **out, size_t nbytes, unsigned flags)
{
    if (!out || nbytes == 0 || flags > 7)
        return CUDA_ERROR_INVALID_VALUE;
    if (exceeds(fake.pinned_limit, fake.pinned_nbytes, nbytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct region *r = region_map(REGION_PINNED, nbytes, flags);
    *out = r ? r->host : NULL;
    return r ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuMemHostAlloc(void **out, size_t nbytes, unsigned flags)
{
    ENTRY(cuMemHostAlloc, NULL, mem_host_alloc(out, nbytes, flags));
}

API CUresult cuMemFreeHost(void *memory)
{
    ENTRY(cuMemFreeHost, NULL, mem_free(REGION_PINNED, (uint64_t)memory));
}

/* Pages are what is locked, so two ranges on one page collide. */
static CUresult mem_host_register(void *memory, size_t nbytes, unsigned flags)
{
    uint64_t address = (uint64_t)memory;
    if (!memory || nbytes == 0 || nbytes > ADDRESS_MAX || address > ADDRESS_MAX || flags > 15)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t first = address / PAGE * PAGE, end = rounded(address + nbytes);
    for (uint32_t i = 0; i < region_count; i++) {
        uint64_t base = (uint64_t)regions[i].host / PAGE * PAGE;
        uint64_t limit = rounded((uint64_t)regions[i].host + regions[i].nbytes);
        if (overlaps(base, limit - base, first, end - first))
            return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    }
    if (!is_mapped(address, nbytes))
        return CUDA_ERROR_INVALID_VALUE;
    if (exceeds(fake.pinned_limit, fake.pinned_nbytes, nbytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    region_add(REGION_REGISTERED, memory, nbytes, flags);
    return CUDA_SUCCESS;
}

API CUresult cuMemHostRegister_v2(void *memory, size_t nbytes, unsigned flags)
{
    ENTRY(cuMemHostRegister, NULL, mem_host_register(memory, nbytes, flags));
}

/* No promise of a wait here: what is still in flight for this memory meets a hole. */
static CUresult mem_host_unregister(void *memory)
{
    struct region *r = memory ? region_starting_at(REGION_REGISTERED, (uint64_t)memory) : NULL;
    if (!r)
        return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    region_free(r);
    return CUDA_SUCCESS;
}

API CUresult cuMemHostUnregister(void *memory)
{
    ENTRY(cuMemHostUnregister, NULL, mem_host_unregister(memory));
}

static CUresult mem_host_get_device_pointer(CUdeviceptr *out, void *memory, unsigned flags)
{
    struct region *r = out && memory && flags == 0 ? region_at((uint64_t)memory) : NULL;
    if (!r || !known_to_host(r) || !overlaps((uint64_t)r->host, r->nbytes, (uint64_t)memory, 1))
        return CUDA_ERROR_INVALID_VALUE;
    if (r->kind == REGION_REGISTERED && !(r->flags & CU_MEMHOSTREGISTER_DEVICEMAP))
        return CUDA_ERROR_INVALID_VALUE;
    *out = r->device + ((uint64_t)memory - (uint64_t)r->host);
    return CUDA_SUCCESS;
}

API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *memory, unsigned flags)
{
    ENTRY(cuMemHostGetDevicePointer, NULL, mem_host_get_device_pointer(out, memory, flags));
}

static uint64_t offset_in(const struct region *r, uint64_t address)
{
    bool by_device = overlaps(r->device, r->nbytes, address, 1);
    return address - (by_device ? r->device : (uint64_t)r->host);
}

static CUresult pointer_get_attribute(void *data, int attribute, CUdeviceptr address)
{
    struct region *r = data && address ? region_at(address) : NULL;
    if (!r)
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)data = r->context;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)data = r->kind == REGION_DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)data = r->device + offset_in(r, address);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (r->kind == REGION_DEVICE)
            return CUDA_ERROR_INVALID_VALUE;
        *(void **)data = r->host + offset_in(r, address);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(uint64_t *)data = r->serial;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(unsigned *)data = 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)data = r->context->device;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)data = address - offset_in(r, address);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)data = r->nbytes;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        *(unsigned *)data = 1;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

API CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address)
{
    ENTRY(cuPointerGetAttribute, NULL, pointer_get_attribute(data, attribute, address));
}

/* Unlike the single form it knows no invalid pointer: what it cannot answer is 0. */
static CUresult pointer_get_attributes(unsigned count, const int *attributes, void **data, CUdeviceptr address)
{
    if (!attributes || !data)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++)
        if (pointer_get_attribute(data[i], attributes[i], address))
            memset(data[i], 0, sizeof(int));
    return CUDA_SUCCESS;
}

API CUresult cuPointerGetAttributes(unsigned count, const int *attributes, void **data, CUdeviceptr address)
{
    ENTRY(cuPointerGetAttributes, NULL, pointer_get_attributes(count, attributes, data, address));
}

static CUresult mem_get_address_range(CUdeviceptr *base, size_t *nbytes, CUdeviceptr address)
{
    struct region *r = address ? region_at(address) : NULL;
    if (!r)
        return CUDA_ERROR_NOT_FOUND;
    if (base)
        *base = address - offset_in(r, address);
    if (nbytes)
        *nbytes = r->nbytes;
    return CUDA_SUCCESS;
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *nbytes, CUdeviceptr address)
{
    ENTRY(cuMemGetAddressRange, NULL, mem_get_address_range(base, nbytes, address));
}

static CUresult mem_get_info(size_t *unused, size_t *total)
{
    if (!unused || !total)
        return CUDA_ERROR_INVALID_VALUE;
    *total = fake.device_limit;
    *unused = fake.device_limit > fake.device_nbytes ? fake.device_limit - fake.device_nbytes : 0;
    return CUDA_SUCCESS;
}

API CUresult cuMemGetInfo_v2(size_t *unused, size_t *total)
{
    ENTRY(cuMemGetInfo, NULL, mem_get_info(unused, total));
}

API CUresult cuMemAlloc(CUdeviceptr *, size_t) API_ALIAS(cuMemAlloc_v2);
API CUresult cuMemFree(CUdeviceptr) API_ALIAS(cuMemFree_v2);
API CUresult cuMemHostRegister(void *, size_t, unsigned) API_ALIAS(cuMemHostRegister_v2);
API CUresult cuMemHostGetDevicePointer(CUdeviceptr *, void *, unsigned) API_ALIAS(cuMemHostGetDevicePointer_v2);
API CUresult cuMemGetAddressRange(CUdeviceptr *, size_t *, CUdeviceptr) API_ALIAS(cuMemGetAddressRange_v2);
API CUresult cuMemGetInfo(size_t *, size_t *) API_ALIAS(cuMemGetInfo_v2);
