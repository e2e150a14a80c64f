/* devices.c: the process, its devices and their primary contexts, and what errors are called. */
#include <stdio.h>
#include <string.h>

#include "fake.h"

static CUresult give_int(int *out, int value)
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = value;
    return CUDA_SUCCESS;
}

static CUresult init(unsigned flags)
{
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (fake.devices == 0)
        return CUDA_ERROR_NO_DEVICE;
    fake.initialised = true;
    return CUDA_SUCCESS;
}

API CUresult cuInit(unsigned flags)
{
    ENTRY(cuInit, NULL, init(flags));
}

API CUresult cuDriverGetVersion(int *out)
{
    ENTRY(cuDriverGetVersion, NULL, give_int(out, fake.driver_version));
}

API CUresult cuDeviceGetCount(int *out)
{
    ENTRY(cuDeviceGetCount, NULL, give_int(out, fake.devices));
}

static bool is_device(CUdevice device)
{
    return device >= 0 && device < fake.devices;
}

API CUresult cuDeviceGet(CUdevice *out, int ordinal)
{
    ENTRY(cuDeviceGet, NULL, is_device(ordinal) ? give_int(out, ordinal) : CUDA_ERROR_INVALID_DEVICE);
}

static CUresult device_get_name(char *name, int room, CUdevice device)
{
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!name || room <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(name, (size_t)room, "Fake device %d", device);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char *name, int room, CUdevice device)
{
    ENTRY(cuDeviceGetName, NULL, device_get_name(name, room, device));
}

/* Numbers of CUdevice_attribute; what is not listed is 0, as on a device without the feature. */
static int attribute_value(int attribute)
{
    switch (attribute) {
    case 1: /* MAX_THREADS_PER_BLOCK */
        return 1024;
    case 10: /* WARP_SIZE */
        return 32;
    case 16: /* MULTIPROCESSOR_COUNT */
        return 132;
    case 19: /* CAN_MAP_HOST_MEMORY */
    case 31: /* CONCURRENT_KERNELS */
    case 41: /* UNIFIED_ADDRESSING */
    case 78: /* STREAM_PRIORITIES_SUPPORTED */
    case 99: /* HOST_REGISTER_SUPPORTED */
        return 1;
    case 40: /* ASYNC_ENGINE_COUNT */
        return 3;
    case 75: /* COMPUTE_CAPABILITY_MAJOR */
        return 9;
    case 91: /* CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM */
        return fake.plain_addresses;
    default:
        return 0;
    }
}

static CUresult device_get_attribute(int *out, int attribute, CUdevice device)
{
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    return attribute <= 0 || attribute > 200 ? CUDA_ERROR_INVALID_VALUE : give_int(out, attribute_value(attribute));
}

API CUresult cuDeviceGetAttribute(int *out, int attribute, CUdevice device)
{
    ENTRY(cuDeviceGetAttribute, NULL, device_get_attribute(out, attribute, device));
}

static CUresult device_total_mem(size_t *out, CUdevice device)
{
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = fake.device_limit;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceTotalMem_v2(size_t *out, CUdevice device)
{
    ENTRY(cuDeviceTotalMem, NULL, device_total_mem(out, device));
}

static CUresult context_retain(CUcontext *out, CUdevice device)
{
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    fake.contexts[device].retained++;
    *out = &fake.contexts[device];
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device)
{
    ENTRY(cuDevicePrimaryCtxRetain, NULL, context_retain(out, device));
}

static CUresult context_release(CUdevice device)
{
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (fake.contexts[device].retained == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    fake.contexts[device].retained--;
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    ENTRY(cuDevicePrimaryCtxRelease, NULL, context_release(device));
}

static CUresult context_state(CUdevice device, unsigned *flags, int *active)
{
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!flags || !active)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = 0;
    *active = fake.contexts[device].retained > 0;
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    ENTRY(cuDevicePrimaryCtxGetState, NULL, context_state(device, flags, active));
}

static bool is_context(CUcontext context)
{
    for (int i = 0; i < DEVICES_MAX; i++)
        if (context == &fake.contexts[i])
            return true;
    return false;
}

/* Replaces the top of the thread's stack; NULL takes it off. */
static CUresult set_current(CUcontext context)
{
    struct thread_state *t = fake_thread();
    if (context && !is_context(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (t->depth)
        t->depth--;
    if (context)
        t->stack[t->depth++] = context;
    return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext context)
{
    ENTRY(cuCtxSetCurrent, NULL, set_current(context));
}

static CUresult give_current(CUcontext *out)
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = fake_current();
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext *out)
{
    ENTRY(cuCtxGetCurrent, NULL, give_current(out));
}

static CUresult push_current(CUcontext context)
{
    struct thread_state *t = fake_thread();
    if (!is_context(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (t->depth == CONTEXT_STACK_MAX)
        return CUDA_ERROR_UNKNOWN;
    t->stack[t->depth++] = context;
    return CUDA_SUCCESS;
}

API CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    ENTRY(cuCtxPushCurrent, NULL, push_current(context));
}

static CUresult pop_current(CUcontext *out)
{
    struct thread_state *t = fake_thread();
    if (t->depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    t->depth--;
    if (out)
        *out = t->stack[t->depth];
    return CUDA_SUCCESS;
}

API CUresult cuCtxPopCurrent_v2(CUcontext *out)
{
    ENTRY(cuCtxPopCurrent, NULL, pop_current(out));
}

API CUresult cuCtxGetDevice(CUdevice *out)
{
    ENTRY(cuCtxGetDevice, NULL, give_int(out, fake_current()->device));
}

static CUresult priority_range(int *least, int *greatest)
{
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    ENTRY(cuCtxGetStreamPriorityRange, NULL, priority_range(least, greatest));
}

/* A capture in the context conflicts with waiting for all of it, whatever the thread's mode. */
static CUresult context_synchronize(void)
{
    struct fake_context *context = fake_current();
    CUresult code = CUDA_SUCCESS;
    for (struct stream *s = fake.streams; s; s = s->next)
        if (s->context == context && s->capture)
            code = fake_capture_conflicts(s);
    return code ? code : fake_force_context(context);
}

API CUresult cuCtxSynchronize(void)
{
    ENTRY(cuCtxSynchronize, NULL, context_synchronize());
}

enum { PER_THREAD_STREAM = 2 };

/* An unknown symbol is not an error of the call: the pointer is NULL and the status says why. */
static CUresult get_proc_address(const char *name, void **out, int version, uint64_t flags, int *status)
{
    if (!name || !out || version > fake.driver_version || flags > PER_THREAD_STREAM)
        return CUDA_ERROR_INVALID_VALUE;
    if (flags == PER_THREAD_STREAM) /* forms in which 0 means another stream: not in the fake */
        return CUDA_ERROR_NOT_SUPPORTED;
    int entry = fake_entry_of(name);
    bool known = entry >= 0 && !fake_hidden[entry];
    const void *address = known ? fake_address_of(entry, version) : NULL;
    *out = (void *)(uintptr_t)address;
    if (status)
        *status = address ? CU_PROC_FOUND : known ? CU_PROC_VERSION_NOT_SUFFICIENT : CU_PROC_SYMBOL_NOT_FOUND;
    return CUDA_SUCCESS;
}

API CUresult cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status)
{
    ENTRY(cuGetProcAddress, NULL, get_proc_address(name, out, version, flags, status));
}

static const struct {
    int code;
    const char *name;
} error_names[] = {
#define X(name) {name, #name}
    X(CUDA_SUCCESS), X(CUDA_ERROR_INVALID_VALUE), X(CUDA_ERROR_OUT_OF_MEMORY), X(CUDA_ERROR_NOT_INITIALIZED),
    X(CUDA_ERROR_DEINITIALIZED), X(CUDA_ERROR_NO_DEVICE), X(CUDA_ERROR_INVALID_DEVICE), X(CUDA_ERROR_INVALID_IMAGE),
    X(CUDA_ERROR_INVALID_CONTEXT), X(CUDA_ERROR_ECC_UNCORRECTABLE), X(CUDA_ERROR_INVALID_PTX),
    X(CUDA_ERROR_NVLINK_UNCORRECTABLE), X(CUDA_ERROR_UNSUPPORTED_PTX_VERSION), X(CUDA_ERROR_OPERATING_SYSTEM),
    X(CUDA_ERROR_INVALID_HANDLE), X(CUDA_ERROR_ILLEGAL_STATE), X(CUDA_ERROR_NOT_FOUND), X(CUDA_ERROR_NOT_READY),
    X(CUDA_ERROR_ILLEGAL_ADDRESS), X(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES), X(CUDA_ERROR_LAUNCH_TIMEOUT),
    X(CUDA_ERROR_CONTEXT_IS_DESTROYED), X(CUDA_ERROR_ASSERT), X(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED),
    X(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED), X(CUDA_ERROR_HARDWARE_STACK_ERROR), X(CUDA_ERROR_ILLEGAL_INSTRUCTION),
    X(CUDA_ERROR_MISALIGNED_ADDRESS), X(CUDA_ERROR_INVALID_ADDRESS_SPACE), X(CUDA_ERROR_INVALID_PC),
    X(CUDA_ERROR_LAUNCH_FAILED), X(CUDA_ERROR_NOT_PERMITTED), X(CUDA_ERROR_NOT_SUPPORTED),
    X(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED), X(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
    X(CUDA_ERROR_STREAM_CAPTURE_MERGE), X(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED), X(CUDA_ERROR_STREAM_CAPTURE_UNJOINED),
    X(CUDA_ERROR_STREAM_CAPTURE_ISOLATION), X(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT), X(CUDA_ERROR_CAPTURED_EVENT),
    X(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD), X(CUDA_ERROR_TIMEOUT), X(CUDA_ERROR_UNKNOWN),
#undef X
};

static CUresult error_name(CUresult error, const char **out)
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = NULL;
    for (size_t i = 0; i < sizeof error_names / sizeof *error_names; i++)
        if (error_names[i].code == error)
            *out = error_names[i].name;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetErrorName(CUresult error, const char **out)
{
    ENTRY(cuGetErrorName, NULL, error_name(error, out));
}

/* The fake has no prose of its own: the name says it. */
API CUresult cuGetErrorString(CUresult error, const char **out)
{
    ENTRY(cuGetErrorString, NULL, error_name(error, out));
}

API CUresult cuDeviceTotalMem(size_t *, CUdevice) API_ALIAS(cuDeviceTotalMem_v2);
API CUresult cuDevicePrimaryCtxRelease(CUdevice) API_ALIAS(cuDevicePrimaryCtxRelease_v2);
API CUresult cuCtxPushCurrent(CUcontext) API_ALIAS(cuCtxPushCurrent_v2);
API CUresult cuCtxPopCurrent(CUcontext *) API_ALIAS(cuCtxPopCurrent_v2);
API CUresult cuGetProcAddress(const char *, void **, int, uint64_t, int *) API_ALIAS(cuGetProcAddress_v2);
