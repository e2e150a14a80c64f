/* modules.c: modules and launches. Any image will do; its content is not looked at, beyond the beginning, because the
 * kernels are in work.c. A function's handle is its module's, with the number of the kernel where the tag was. */
#include <string.h>

#include "fake.h"

static uint8_t module; /* modules have no content either */

#define MODULE_BITS ((1ull << 48) - 1)

/* "!" starts an image that does not compile, so that a test can have one. */
static CUresult module_load(CUmodule *out, const void *image)
{
    if (!out || !image)
        return CUDA_ERROR_INVALID_VALUE;
    if (*(const char *)image == '!')
        return CUDA_ERROR_INVALID_PTX;
    *out = fake_handle_new(TAG_MODULE, &module);
    return CUDA_SUCCESS;
}

API CUresult cuModuleLoadData(CUmodule *out, const void *image)
{
    ENTRY(cuModuleLoadData, NULL, module_load(out, image));
}

API CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned count, int *options, void **values)
{
    (void)count, (void)options, (void)values;
    ENTRY(cuModuleLoadDataEx, NULL, module_load(out, image));
}

static int kernel_of(const char *name)
{
    static const char *const names[] = {NULL, "akv_gather", "akv_scatter", "fake_fill", "fake_slow"};
    for (int kind = KERNEL_GATHER; kind <= KERNEL_SLOW; kind++)
        if (strcmp(names[kind], name) == 0)
            return kind;
    return 0;
}

static CUresult module_get_function(CUfunction *out, CUmodule handle, const char *name)
{
    if (!fake_handle_get(TAG_MODULE, handle))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out || !name)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t kind = (uint64_t)kernel_of(name);
    if (!kind)
        return CUDA_ERROR_NOT_FOUND;
    *out = (CUfunction)((uint64_t)TAG_FUNCTION << 56 | kind << 48 | ((uint64_t)handle & MODULE_BITS));
    return CUDA_SUCCESS;
}

API CUresult cuModuleGetFunction(CUfunction *out, CUmodule handle, const char *name)
{
    ENTRY(cuModuleGetFunction, NULL, module_get_function(out, handle, name));
}

static CUresult module_unload(CUmodule handle)
{
    if (!fake_handle_get(TAG_MODULE, handle))
        return CUDA_ERROR_INVALID_HANDLE;
    fake_handle_drop(handle);
    return CUDA_SUCCESS;
}

API CUresult cuModuleUnload(CUmodule handle)
{
    ENTRY(cuModuleUnload, NULL, module_unload(handle));
}

/* 0: no such function, or its module has been unloaded. */
static int kernel_of_function(CUfunction function)
{
    uint64_t bits = (uint64_t)function;
    uint64_t module_handle = (uint64_t)TAG_MODULE << 56 | (bits & MODULE_BITS);
    if (bits >> 56 != TAG_FUNCTION || !fake_handle_get(TAG_MODULE, (void *)module_handle))
        return 0;
    int kind = (int)(bits >> 48 & 0xff);
    return kind >= KERNEL_GATHER && kind <= KERNEL_SLOW ? kind : 0;
}

struct launch {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_nbytes;
};

static CUresult launch_is_valid(const struct launch *l)
{
    uint64_t threads = (uint64_t)l->block[0] * l->block[1] * l->block[2];
    uint64_t blocks = (uint64_t)l->grid[0] * l->grid[1] * l->grid[2];
    if (threads == 0 || blocks == 0 || threads > 1024 || l->block[2] > 64 || l->shared_nbytes > 232448)
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

/* Parameters are copied now; what they point to is read by the kernel. */
static void read_parameters(struct op *op, int kind, void **parameters)
{
    op->kernel.kind = kind;
    if (kind == KERNEL_SLOW) {
        op->slow_left = *(uint32_t *)parameters[0];
        return;
    }
    op->kernel.address = *(uint64_t *)parameters[0];
    if (kind == KERNEL_FILL) {
        op->kernel.count = *(uint64_t *)parameters[1];
        op->kernel.value = *(uint32_t *)parameters[2];
    } else {
        op->kernel.count = *(uint32_t *)parameters[1];
    }
}

static CUresult launch_kernel(CUfunction function, const struct launch *l, CUstream handle, void **parameters)
{
    int kind = kernel_of_function(function);
    struct stream *stream = fake_stream_of(handle);
    if (!kind || !stream)
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult code = parameters ? launch_is_valid(l) : CUDA_ERROR_INVALID_VALUE;
    if (code == CUDA_SUCCESS)
        code = fake_admit(stream);
    if (code)
        return code == ADMIT_CAPTURED ? CUDA_SUCCESS : code;
    struct op *op = fake_op_new(OP_KERNEL, stream);
    read_parameters(op, kind, parameters);
    fake_op_issue(op);
    return CUDA_SUCCESS;
}

API CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared_nbytes, CUstream stream,
                            void **parameters, void **extra)
{
    struct launch launch = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_nbytes};
    ENTRY(cuLaunchKernel, stream,
          extra ? CUDA_ERROR_NOT_SUPPORTED : launch_kernel(function, &launch, stream, parameters));
}
