/* region.c: memory the ring knows. Region 0 is the staging slab; the others are callers' landing regions. A region
 * that is being removed lends no more, and its batch ends when the last flight on it has. */
#include <errno.h>

#include "internal.h"

static struct akv_region *find_exact(struct akv_reactor *r, uint64_t address, uint64_t nbytes)
{
    for (uint32_t i = 1; i < r->region_count; i++)
        if (r->regions[i].is_open && r->regions[i].address == address && r->regions[i].nbytes == nbytes)
            return &r->regions[i];
    return NULL;
}

/* What the ring refuses is still worth knowing if it is pinned: then only I/O in it goes unregistered. */
static int add(struct akv_reactor *r, uint64_t address, uint64_t nbytes, uint64_t device_address)
{
    if (address == 0 || nbytes == 0 || address > UINT64_MAX - nbytes)
        return -EINVAL;
    if (find_exact(r, address, nbytes))
        return -EEXIST;
    for (uint32_t i = 1; i < AKV_REGIONS_MAX; i++) {
        struct akv_region *region = &r->regions[i];
        if (region->is_open || region->remover)
            continue;
        *region = (struct akv_region){.address = address, .nbytes = nbytes, .device_address = device_address};
        int code = r->source->region_add(r, region);
        if (code && !device_address)
            return code;
        region->is_registered = code == 0;
        region->is_open = true;
        if (i >= r->region_count)
            r->region_count = i + 1;
        return code;
    }
    return -ENOSPC;
}

static void remove_now(struct akv_reactor *r, struct akv_region *region)
{
    struct akv_batch *b = region->remover;
    if (region->is_lost) /* the caller must neither unpin nor free it */
        b->status = -(AKV_CUDA_ERROR + r->device.error);
    if (region->is_registered)
        r->source->region_remove(r, region);
    region->remover = NULL;
    akv_batch_finish(r, b);
}

void akv_region_command(struct akv_reactor *r, struct akv_batch *b)
{
    if (b->kind == AKV_REGION_ADD) {
        b->status = add(r, b->region_address, b->region_nbytes, b->region_device);
        akv_batch_finish(r, b);
        return;
    }
    struct akv_region *region = find_exact(r, b->region_address, b->region_nbytes);
    if (!region) {
        b->status = -ENOENT;
        akv_batch_finish(r, b);
        return;
    }
    region->is_open = false;
    region->remover = b;
    if (region->in_flight == 0)
        remove_now(r, region);
}

/* The region that holds [address, address + nbytes) inside one registered buffer, or NULL. Takes a share in it. */
struct akv_region *akv_region_find(struct akv_reactor *r, uint64_t address, uint32_t nbytes, int32_t *buffer)
{
    for (uint32_t i = 0; i < r->region_count; i++) {
        struct akv_region *region = &r->regions[i];
        if (!region->is_open || !region->is_registered || address < region->address ||
            address - region->address >= region->nbytes)
            continue;
        uint64_t first = address - region->address, last = first + nbytes - 1;
        if (last >= region->nbytes || first / AKV_PIECE != last / AKV_PIECE)
            continue;
        *buffer = region->buffer_first + first / AKV_PIECE;
        region->in_flight++;
        return region;
    }
    return NULL;
}

/* The pinned region that holds [address, address + nbytes), or NULL. Takes a share in it. */
struct akv_region *akv_region_pinned(struct akv_reactor *r, uint64_t address, uint64_t nbytes)
{
    for (uint32_t i = 1; i < r->region_count; i++) {
        struct akv_region *region = &r->regions[i];
        if (!region->is_open || !region->device_address || address < region->address ||
            address - region->address >= region->nbytes || region->nbytes - (address - region->address) < nbytes)
            continue;
        region->in_flight++;
        return region;
    }
    return NULL;
}

void akv_region_release(struct akv_reactor *r, struct akv_region *region)
{
    if (--region->in_flight == 0 && region->remover)
        remove_now(r, region);
}
