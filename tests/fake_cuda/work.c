/* work.c: what operations do once their time has come: copies, sets, kernels, host functions; and the entry points that
 * queue them. */
#include <stdlib.h>
#include <string.h>

#include "fake.h"

/* One entry of the list that akv_gather and akv_scatter read. */
struct kernel_copy {
    uint64_t target;
    uint64_t source;
    uint64_t nbytes;
};

static CUresult move(const struct transfer *t)
{
    uint8_t *target = fake_place_bytes(&t->target);
    const uint8_t *source = t->is_set ? target : t->snapshot ? t->snapshot : fake_place_bytes(&t->source);
    if (!target || !source) {
        fake_violate("a copy of %llu bytes found its %s gone", (unsigned long long)t->nbytes,
                     target ? "source" : "target");
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    if (t->is_set)
        memset(target, t->value, t->nbytes);
    else
        memmove(target, source, t->nbytes);
    return CUDA_SUCCESS;
}

/* Indices 0..count-1 in an order of the seed's: copies of a batch, and blocks of a kernel, have no order. */
static uint64_t *shuffled(uint64_t count)
{
    uint64_t *order = fake_allocate(count, sizeof *order);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t j = fake_draw(i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    return order;
}

static CUresult run_transfers(const struct op *op)
{
    CUresult code = CUDA_SUCCESS;
    uint64_t *order = shuffled(op->transfer_count);
    for (uint64_t i = 0; i < op->transfer_count && code == CUDA_SUCCESS; i++)
        code = move(&op->transfers[order[i]]);
    free(order);
    return code;
}

static CUresult run_list(const struct kernel_copy *list, uint64_t count)
{
    CUresult code = CUDA_SUCCESS;
    uint64_t *order = shuffled(count);
    for (uint64_t i = 0; i < count && code == CUDA_SUCCESS; i++) {
        struct kernel_copy copy = list[order[i]];
        uint8_t *target = fake_kernel_bytes(copy.target, copy.nbytes);
        const uint8_t *source = fake_kernel_bytes(copy.source, copy.nbytes);
        if (target && source) {
            memmove(target, source, copy.nbytes);
        } else {
            fake_violate("entry %llu of a kernel's list names a %s that the device does not know: %#llx",
                         (unsigned long long)order[i], target ? "source" : "target",
                         (unsigned long long)(target ? copy.source : copy.target));
            code = CUDA_ERROR_ILLEGAL_ADDRESS;
        }
    }
    free(order);
    return code;
}

static CUresult run_kernel(const struct kernel *kernel)
{
    if (kernel->kind == KERNEL_SLOW)
        return CUDA_SUCCESS;
    if (kernel->kind == KERNEL_FILL) {
        uint8_t *target = fake_kernel_bytes(kernel->address, kernel->count);
        if (!target)
            return CUDA_ERROR_ILLEGAL_ADDRESS;
        memset(target, (uint8_t)kernel->value, kernel->count);
        return CUDA_SUCCESS;
    }
    if (kernel->address % sizeof(uint64_t))
        return CUDA_ERROR_MISALIGNED_ADDRESS;
    const uint8_t *list = fake_kernel_bytes(kernel->address, kernel->count * sizeof(struct kernel_copy));
    if (!list) {
        fake_violate("a kernel's list is not where the device could read it: %#llx",
                     (unsigned long long)kernel->address);
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    return run_list((const struct kernel_copy *)list, kernel->count);
}

static void call_host_function(const struct op *op)
{
    struct thread_state *t = fake_thread();
    t->running_host_function++;
    op->function(op->data);
    t->running_host_function--;
}

CUresult fake_op_work(struct op *op)
{
    if (op->kind == OP_TRANSFERS)
        return run_transfers(op);
    if (op->kind == OP_KERNEL)
        return run_kernel(&op->kernel);
    if (op->kind == OP_HOST_FUNCTION && !fake.sticky) /* after an error the driver does not call it */
        call_host_function(op);
    return CUDA_SUCCESS;
}

static void take_snapshot(struct transfer *t)
{
    t->snapshot = fake_allocate(t->nbytes, 1);
    memcpy(t->snapshot, t->source.host, t->nbytes);
}

/* Pageable memory goes through the driver's own staging: such a source is read during the call, and such a target has
 * been written when the call returns, so the host waits. */
static CUresult queue_transfers(struct stream *stream, struct transfer *transfers, uint64_t count)
{
    struct op *op = fake_op_new(OP_TRANSFERS, stream);
    op->transfers = transfers;
    op->transfer_count = count;
    CUresult code = stream ? fake_admit(stream) : CUDA_ERROR_INVALID_HANDLE;
    if (code) {
        fake_op_drop(op);
        return code == ADMIT_CAPTURED ? CUDA_SUCCESS : code;
    }
    bool pageable_target = false;
    for (uint64_t i = 0; i < count; i++) {
        struct transfer *t = &transfers[i];
        if (!t->is_set && !t->source.region && !t->snapshot)
            take_snapshot(t);
        pageable_target |= !t->target.region;
    }
    fake_op_issue(op);
    return pageable_target ? fake_force(&op, 1) : CUDA_SUCCESS;
}

enum { TARGET_KNOWN = 1, SOURCE_KNOWN = 2 }; /* which ends CUDA must have handed out or registered */

static CUresult transfer_of(uint64_t target, uint64_t source, uint64_t nbytes, int known, struct transfer *out)
{
    *out = (struct transfer){.nbytes = nbytes};
    CUresult code = fake_place(target, nbytes, &out->target);
    if (code == CUDA_SUCCESS)
        code = fake_place(source, nbytes, &out->source);
    if (code == CUDA_SUCCESS && ((known & TARGET_KNOWN && !out->target.region) ||
                                 (known & SOURCE_KNOWN && !out->source.region)))
        code = CUDA_ERROR_INVALID_VALUE;
    return code;
}

static CUresult copy_async(uint64_t target, uint64_t source, size_t nbytes, int known, CUstream handle)
{
    struct stream *stream = fake_stream_of(handle);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (nbytes == 0)
        return CUDA_SUCCESS;
    struct transfer *t = fake_allocate(1, sizeof *t);
    CUresult code = transfer_of(target, source, nbytes, known, t);
    if (code) {
        free(t);
        return code;
    }
    return queue_transfers(stream, t, 1);
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void *source, size_t nbytes, CUstream stream)
{
    ENTRY(cuMemcpyHtoDAsync, stream, copy_async(target, (uint64_t)source, nbytes, TARGET_KNOWN, stream));
}

API CUresult cuMemcpyDtoHAsync_v2(void *target, CUdeviceptr source, size_t nbytes, CUstream stream)
{
    ENTRY(cuMemcpyDtoHAsync, stream, copy_async((uint64_t)target, source, nbytes, SOURCE_KNOWN, stream));
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, size_t nbytes, CUstream stream)
{
    ENTRY(cuMemcpyDtoDAsync, stream, copy_async(target, source, nbytes, TARGET_KNOWN | SOURCE_KNOWN, stream));
}

API CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t nbytes, CUstream stream)
{
    ENTRY(cuMemcpyAsync, stream, copy_async(target, source, nbytes, 0, stream));
}

/* On the legacy stream, and the host waits: non-blocking streams are none of its business. */
static CUresult copy_now(uint64_t target, uint64_t source, size_t nbytes, int known)
{
    struct stream *legacy = fake_stream_of((CUstream)CU_STREAM_LEGACY);
    CUresult code = fake_capture_conflicts(legacy);
    if (code == CUDA_SUCCESS)
        code = copy_async(target, source, nbytes, known, (CUstream)CU_STREAM_LEGACY);
    return code ? code : fake_force_stream(legacy);
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void *source, size_t nbytes)
{
    ENTRY(cuMemcpyHtoD, NULL, copy_now(target, (uint64_t)source, nbytes, TARGET_KNOWN));
}

API CUresult cuMemcpyDtoH_v2(void *target, CUdeviceptr source, size_t nbytes)
{
    ENTRY(cuMemcpyDtoH, NULL, copy_now((uint64_t)target, source, nbytes, SOURCE_KNOWN));
}

static CUresult set_async(CUdeviceptr target, uint8_t value, size_t nbytes, CUstream handle)
{
    struct stream *stream = fake_stream_of(handle);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    struct transfer *t = fake_allocate(1, sizeof *t);
    *t = (struct transfer){.nbytes = nbytes, .is_set = true, .value = value};
    CUresult code = fake_place(target, nbytes, &t->target);
    if (code || !t->target.region || nbytes == 0) {
        free(t);
        return nbytes == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
    return queue_transfers(stream, t, 1);
}

API CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t nbytes, CUstream stream)
{
    ENTRY(cuMemsetD8Async, stream, set_async(target, value, nbytes, stream));
}

struct batch {
    CUdeviceptr *targets;
    CUdeviceptr *sources;
    size_t *sizes;
    size_t count;
    CUmemcpyAttributes *attributes;
    size_t *indices;
    size_t attribute_count;
};

static bool batch_is_valid(const struct batch *b)
{
    if (!b->targets || !b->sources || !b->sizes || b->count == 0)
        return false;
    if (!b->attributes || !b->indices || b->attribute_count == 0 || b->attribute_count > b->count || b->indices[0])
        return false;
    for (size_t i = 0; i < b->attribute_count; i++) {
        uint32_t order = b->attributes[i].source_access_order;
        bool rises = i == 0 || b->indices[i] > b->indices[i - 1];
        if (order < CU_SOURCE_ORDER_STREAM || order > CU_SOURCE_ORDER_ANY || !rises || b->indices[i] >= b->count)
            return false;
    }
    return true;
}

/* ANY lets the source be read at any moment from the call on, so the seed takes an early or a late one. */
static CUresult fill_batch(const struct batch *b, struct transfer *out)
{
    size_t attribute = 0;
    for (size_t i = 0; i < b->count; i++) {
        while (attribute + 1 < b->attribute_count && b->indices[attribute + 1] <= i)
            attribute++;
        CUresult code = b->sizes[i] ? transfer_of(b->targets[i], b->sources[i], b->sizes[i], 0, &out[i])
                                    : CUDA_ERROR_INVALID_VALUE;
        if (code)
            return code;
        uint32_t order = b->attributes[attribute].source_access_order;
        if (order == CU_SOURCE_ORDER_DURING_API_CALL || (order == CU_SOURCE_ORDER_ANY && fake_draw(2)))
            take_snapshot(&out[i]);
    }
    return CUDA_SUCCESS;
}

static CUresult copy_batch(const struct batch *b, CUstream handle)
{
    struct stream *stream = fake_stream_of(handle);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (stream->legacy || !batch_is_valid(b)) /* the driver takes no legacy stream here */
        return CUDA_ERROR_INVALID_VALUE;
    struct transfer *transfers = fake_allocate(b->count, sizeof *transfers);
    CUresult code = fill_batch(b, transfers);
    if (code == CUDA_SUCCESS)
        return queue_transfers(stream, transfers, b->count);
    for (size_t i = 0; i < b->count; i++)
        free(transfers[i].snapshot);
    free(transfers);
    return code;
}

API CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *targets, CUdeviceptr *sources, size_t *sizes, size_t count,
                                   CUmemcpyAttributes *attributes, size_t *indices, size_t attribute_count,
                                   CUstream stream)
{
    struct batch batch = {targets, sources, sizes, count, attributes, indices, attribute_count};
    ENTRY(cuMemcpyBatchAsync, stream, copy_batch(&batch, stream));
}

/* The form of CUDA 12.8, which cuGetProcAddress hands to those who ask for a version below 13. */
CUresult fake_memcpy_batch_async_12080(CUdeviceptr *targets, CUdeviceptr *sources, size_t *sizes, size_t count,
                                       CUmemcpyAttributes *attributes, size_t *indices, size_t attribute_count,
                                       size_t *failed, CUstream stream)
{
    CUresult code = cuMemcpyBatchAsync_v2(targets, sources, sizes, count, attributes, indices, attribute_count, stream);
    if (code && failed)
        *failed = SIZE_MAX;
    return code;
}

static CUresult launch_host_function(CUstream handle, CUhostFn function, void *data)
{
    struct stream *stream = fake_stream_of(handle);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!function)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult code = fake_admit(stream);
    if (code)
        return code == ADMIT_CAPTURED ? CUDA_SUCCESS : code;
    struct op *op = fake_op_new(OP_HOST_FUNCTION, stream);
    op->function = function;
    op->data = data;
    fake_op_issue(op);
    return CUDA_SUCCESS;
}

API CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data)
{
    ENTRY(cuLaunchHostFunc, stream, launch_host_function(stream, function, data));
}

API CUresult cuMemcpyHtoDAsync(CUdeviceptr, const void *, size_t, CUstream) API_ALIAS(cuMemcpyHtoDAsync_v2);
API CUresult cuMemcpyDtoHAsync(void *, CUdeviceptr, size_t, CUstream) API_ALIAS(cuMemcpyDtoHAsync_v2);
API CUresult cuMemcpyDtoDAsync(CUdeviceptr, CUdeviceptr, size_t, CUstream) API_ALIAS(cuMemcpyDtoDAsync_v2);
API CUresult cuMemcpyHtoD(CUdeviceptr, const void *, size_t) API_ALIAS(cuMemcpyHtoD_v2);
API CUresult cuMemcpyDtoH(void *, CUdeviceptr, size_t) API_ALIAS(cuMemcpyDtoH_v2);
API CUresult cuMemcpyBatchAsync(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, size_t *, size_t,
                                CUstream) API_ALIAS(cuMemcpyBatchAsync_v2);
