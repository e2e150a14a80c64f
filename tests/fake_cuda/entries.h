/* Every entry point of the fake driver, in one table: its name, the symbol that carries the current form, the CUDA
 * version that brought that form (for cuGetProcAddress), and what the driver demands of a call.
 *
 *   ALWAYS     needs no cuInit and answers after a sticky error too
 *   BARE       needs cuInit but no current context
 *   CONTEXT    needs a current context
 *   UNSAFE     prohibited while a capture forbids it (cuThreadExchangeStreamCaptureMode)
 *   WAITS      may make the host wait for the device: the call counts as synchronising */
#ifndef FAKE_ENTRIES_H
#define FAKE_ENTRIES_H

enum { ALWAYS = 1, BARE = 2, CONTEXT = 4, UNSAFE = 8, WAITS = 16 };

#define FAKE_ENTRIES(X)                                                                              \
    X(cuInit, cuInit, 2000, ALWAYS)                                                                  \
    X(cuDriverGetVersion, cuDriverGetVersion, 2020, ALWAYS)                                          \
    X(cuGetErrorName, cuGetErrorName, 6000, ALWAYS)                                                  \
    X(cuGetErrorString, cuGetErrorString, 6000, ALWAYS)                                              \
    X(cuGetProcAddress, cuGetProcAddress_v2, 12000, ALWAYS)                                          \
    X(cuDeviceGetCount, cuDeviceGetCount, 2000, BARE)                                                \
    X(cuDeviceGet, cuDeviceGet, 2000, BARE)                                                          \
    X(cuDeviceGetName, cuDeviceGetName, 2000, BARE)                                                  \
    X(cuDeviceGetAttribute, cuDeviceGetAttribute, 2000, BARE)                                        \
    X(cuDeviceTotalMem, cuDeviceTotalMem_v2, 3020, BARE)                                             \
    X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000, BARE)                                \
    X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, 11000, BARE)                          \
    X(cuDevicePrimaryCtxGetState, cuDevicePrimaryCtxGetState, 7000, BARE)                            \
    X(cuCtxSetCurrent, cuCtxSetCurrent, 4000, BARE)                                                  \
    X(cuCtxGetCurrent, cuCtxGetCurrent, 4000, BARE)                                                  \
    X(cuCtxPushCurrent, cuCtxPushCurrent_v2, 4000, BARE)                                             \
    X(cuCtxPopCurrent, cuCtxPopCurrent_v2, 4000, BARE)                                               \
    X(cuCtxGetDevice, cuCtxGetDevice, 2000, CONTEXT)                                                 \
    X(cuCtxGetStreamPriorityRange, cuCtxGetStreamPriorityRange, 5050, CONTEXT)                       \
    X(cuCtxSynchronize, cuCtxSynchronize, 2000, CONTEXT | UNSAFE | WAITS)                            \
    X(cuMemGetInfo, cuMemGetInfo_v2, 3020, CONTEXT)                                                  \
    X(cuMemAlloc, cuMemAlloc_v2, 3020, CONTEXT | UNSAFE)                                             \
    X(cuMemFree, cuMemFree_v2, 3020, CONTEXT | UNSAFE | WAITS)                                       \
    X(cuMemHostAlloc, cuMemHostAlloc, 2020, CONTEXT | UNSAFE)                                        \
    X(cuMemFreeHost, cuMemFreeHost, 2000, CONTEXT | UNSAFE | WAITS)                                  \
    X(cuMemHostRegister, cuMemHostRegister_v2, 6050, CONTEXT | UNSAFE)                               \
    X(cuMemHostUnregister, cuMemHostUnregister, 4000, CONTEXT | UNSAFE)                              \
    X(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2, 3020, CONTEXT)                        \
    X(cuPointerGetAttribute, cuPointerGetAttribute, 4000, BARE)                                      \
    X(cuPointerGetAttributes, cuPointerGetAttributes, 7000, BARE)                                    \
    X(cuMemGetAddressRange, cuMemGetAddressRange_v2, 3020, CONTEXT)                                  \
    X(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, 3020, CONTEXT)                                        \
    X(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, 3020, CONTEXT)                                        \
    X(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, 3020, CONTEXT)                                        \
    X(cuMemcpyAsync, cuMemcpyAsync, 4000, CONTEXT)                                                   \
    X(cuMemcpyHtoD, cuMemcpyHtoD_v2, 3020, CONTEXT | UNSAFE | WAITS)                                 \
    X(cuMemcpyDtoH, cuMemcpyDtoH_v2, 3020, CONTEXT | UNSAFE | WAITS)                                 \
    X(cuMemcpyBatchAsync, cuMemcpyBatchAsync_v2, 13000, CONTEXT)                                     \
    X(cuMemsetD8Async, cuMemsetD8Async, 3020, CONTEXT)                                               \
    X(cuStreamCreate, cuStreamCreate, 2000, CONTEXT)                                                 \
    X(cuStreamCreateWithPriority, cuStreamCreateWithPriority, 5050, CONTEXT)                         \
    X(cuStreamDestroy, cuStreamDestroy_v2, 4000, CONTEXT)                                            \
    X(cuStreamQuery, cuStreamQuery, 2000, CONTEXT | UNSAFE)                                          \
    X(cuStreamSynchronize, cuStreamSynchronize, 2000, CONTEXT | UNSAFE | WAITS)                      \
    X(cuStreamWaitEvent, cuStreamWaitEvent, 3020, CONTEXT)                                           \
    X(cuStreamGetCtx, cuStreamGetCtx, 9020, CONTEXT)                                                 \
    X(cuStreamGetFlags, cuStreamGetFlags, 5050, CONTEXT)                                             \
    X(cuStreamIsCapturing, cuStreamIsCapturing, 10000, CONTEXT)                                      \
    X(cuStreamBeginCapture, cuStreamBeginCapture_v2, 10010, CONTEXT)                                 \
    X(cuStreamEndCapture, cuStreamEndCapture, 10000, CONTEXT)                                        \
    X(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, 10010, BARE)             \
    X(cuGraphDestroy, cuGraphDestroy, 10000, CONTEXT)                                                \
    X(cuEventCreate, cuEventCreate, 2000, CONTEXT)                                                   \
    X(cuEventDestroy, cuEventDestroy_v2, 4000, CONTEXT)                                              \
    X(cuEventRecord, cuEventRecord, 2000, CONTEXT)                                                   \
    X(cuEventQuery, cuEventQuery, 2000, CONTEXT | UNSAFE)                                            \
    X(cuEventSynchronize, cuEventSynchronize, 2000, CONTEXT | UNSAFE | WAITS)                        \
    X(cuLaunchHostFunc, cuLaunchHostFunc, 10000, CONTEXT)                                            \
    X(cuLaunchKernel, cuLaunchKernel, 4000, CONTEXT)                                                 \
    X(cuModuleLoadData, cuModuleLoadData, 2000, CONTEXT | UNSAFE)                                    \
    X(cuModuleLoadDataEx, cuModuleLoadDataEx, 2010, CONTEXT | UNSAFE)                                \
    X(cuModuleGetFunction, cuModuleGetFunction, 2000, CONTEXT)                                       \
    X(cuModuleUnload, cuModuleUnload, 2000, CONTEXT | UNSAFE)

enum fake_entry {
#define X(name, symbol, since, rules) ENTRY_##name,
    FAKE_ENTRIES(X)
#undef X
    ENTRY_COUNT
};

#endif
