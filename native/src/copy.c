/* copy.c: bytes between a staging slot and memory, and the check of the list that says how. The only place where
 * staged bytes are moved, so that a device copy has one door to come in by. */
#include <errno.h>
#include <string.h>

#include "internal.h"

/* The list was handed over by the caller: every entry must lie inside the op, and inside the list it came with.
 * Memory that the device reaches without a slot must be aligned for it; not every file system would say so. */
int akv_copy_check(const struct akv_batch *b, const akv_op *op, uint32_t alignment)
{
    if (op->placement == AKV_DIRECT)
        return !op->address ? -EFAULT : op->address % alignment ? -EINVAL : 0;
    if ((uint64_t)op->copy_first + op->copy_count > b->copy_count)
        return -EINVAL;
    if (op->placement == AKV_PINNED && (op->copy_count == 0 || op->copy_count > AKV_LIST_MAX || op->file_offset > AKV_UNIT_MAX))
        return -EINVAL;
    if (op->placement == AKV_VECTORED && (op->copy_count == 0 || op->copy_count > AKV_IOV_MAX))
        return -EINVAL;
    uint64_t unit = akv_unit(op);
    uint64_t end = 0, limit = op->nbytes_owed ? op->nbytes_owed : op->nbytes * unit; /* behind it: somebody else's old bytes */
    for (uint32_t i = 0; i < op->copy_count; i++) {
        const akv_copy *copy = &b->copies[op->copy_first + i];
        if (!copy->address || copy->op_offset * unit + copy->nbytes > limit)
            return -EINVAL;
        if (op->placement == AKV_VECTORED && (copy->op_offset != end || copy->address % alignment))
            return -EINVAL;
        end = (uint64_t)copy->op_offset + copy->nbytes;
    }
    return op->placement == AKV_VECTORED && end != op->nbytes ? -EINVAL : 0;
}

void akv_copy_out(struct akv_reactor *r, struct akv_flight *f)
{
    const akv_copy *copies = f->batch->copies + f->op.copy_first;
    uint64_t moved = 0;
    for (uint32_t i = 0; i < f->op.copy_count; i++) {
        akv_copy copy = copies[i];
        if ((uint64_t)copy.op_offset + copy.nbytes > f->op.nbytes)
            continue; /* changed since it was checked: never past the slot */
        memcpy((void *)(uintptr_t)copy.address, f->base + copy.op_offset, copy.nbytes);
        moved += copy.nbytes;
    }
    AKV_COUNT(r, bytes_staged, moved);
}

/* For a write whose bytes come from the device: zeros where no copy goes, before any copy is queued. */
void akv_copy_blank(struct akv_flight *f)
{
    const akv_copy *copies = f->batch->copies + f->op.copy_first;
    uint64_t end = 0;
    for (uint32_t i = 0; i < f->op.copy_count; i++) {
        akv_copy copy = copies[i];
        if ((uint64_t)copy.op_offset + copy.nbytes > f->op.nbytes)
            continue;
        if (copy.op_offset > end)
            memset(f->base + end, 0, copy.op_offset - end);
        end = (uint64_t)copy.op_offset + copy.nbytes;
    }
    if (end < f->op.nbytes)
        memset(f->base + end, 0, f->op.nbytes - end);
}

void akv_copy_in(struct akv_reactor *r, struct akv_flight *f)
{
    const akv_copy *copies = f->batch->copies + f->op.copy_first;
    uint64_t moved = 0, end = 0;
    for (uint32_t i = 0; i < f->op.copy_count; i++) {
        akv_copy copy = copies[i];
        if ((uint64_t)copy.op_offset + copy.nbytes > f->op.nbytes)
            continue;
        if (copy.op_offset > end) /* the slot held somebody else's bytes: what no copy covers is written as zeros */
            memset(f->base + end, 0, copy.op_offset - end);
        memcpy(f->base + copy.op_offset, (const void *)(uintptr_t)copy.address, copy.nbytes);
        moved += copy.nbytes;
        if ((uint64_t)copy.op_offset + copy.nbytes > end) /* the list may come in any order */
            end = (uint64_t)copy.op_offset + copy.nbytes;
    }
    if (end < f->op.nbytes)
        memset(f->base + end, 0, f->op.nbytes - end);
    AKV_COUNT(r, bytes_staged, moved);
}
