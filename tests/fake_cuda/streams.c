/* streams.c: streams and events. A record notes the stream's position at the call; a wait notes the event's state at
 * the call. */
#include <stdlib.h>

#include "fake.h"

struct stream *fake_stream_new(struct fake_context *context, unsigned flags)
{
    struct stream *stream = fake_allocate(1, sizeof *stream);
    stream->id = ++fake.stream_ids;
    stream->context = context;
    stream->flags = flags;
    stream->next = fake.streams;
    fake.streams = stream;
    return stream;
}

static struct stream *legacy_of(struct fake_context *context)
{
    if (!context->legacy) {
        context->legacy = fake_stream_new(context, 0);
        context->legacy->legacy = true;
    }
    return context->legacy;
}

/* 0 and 1 are the current context's legacy stream, 2 the calling thread's own one, which is a blocking stream. */
struct stream *fake_stream_of(CUstream handle)
{
    if ((uint64_t)handle > CU_STREAM_PER_THREAD)
        return fake_handle_get(TAG_STREAM, handle);
    struct fake_context *context = fake_current();
    if (!context)
        return NULL;
    if ((uint64_t)handle <= CU_STREAM_LEGACY)
        return legacy_of(context);
    struct stream **own = &fake_thread()->per_thread[context->device];
    if (!*own)
        *own = fake_stream_new(context, 0);
    return *own;
}

static void stream_unlink(struct stream *stream)
{
    struct stream **link = &fake.streams;
    while (*link != stream)
        link = &(*link)->next;
    *link = stream->next;
}

/* A destroyed stream goes once its last operation has. */
void fake_stream_reap(struct stream *stream)
{
    if (!stream->destroyed || stream->head)
        return;
    stream_unlink(stream);
    free(stream);
}

static void event_free(void *object)
{
    struct event *event = object;
    fake_op_drop(event->record);
    free(event);
}

void fake_streams_reset(void)
{
    fake_handles_each(TAG_EVENT, event_free);
    for (struct stream *s = fake.streams; s; s = s->next) {
        fake_queue_clear(s);
        fake_op_drop(s->marker);
    }
    while (fake.streams) {
        struct stream *stream = fake.streams;
        fake.streams = stream->next;
        free(stream);
    }
}

static CUresult stream_create(CUstream *out, unsigned flags)
{
    if (!out || flags > CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    struct stream *stream = fake_stream_new(fake_current(), flags);
    stream->handle = fake_handle_new(TAG_STREAM, stream);
    *out = stream->handle;
    return CUDA_SUCCESS;
}

API CUresult cuStreamCreate(CUstream *out, unsigned flags)
{
    ENTRY(cuStreamCreate, NULL, stream_create(out, flags));
}

API CUresult cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority)
{
    (void)priority; /* priorities change nothing about what is legal */
    ENTRY(cuStreamCreateWithPriority, NULL, stream_create(out, flags));
}

/* Work that is queued stays queued: destroying does not wait. */
static CUresult stream_destroy(CUstream handle)
{
    struct stream *stream = fake_handle_get(TAG_STREAM, handle);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    fake_capture_leave(stream);
    fake_handle_drop(handle);
    stream->destroyed = true;
    stream->held = false; /* nobody could release it any more */
    fake_changed();
    fake_stream_reap(stream);
    return CUDA_SUCCESS;
}

API CUresult cuStreamDestroy_v2(CUstream stream)
{
    ENTRY(cuStreamDestroy, stream, stream_destroy(stream));
}

static CUresult stream_query(CUstream handle)
{
    struct stream *stream = fake_stream_of(handle);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult code = fake_capture_conflicts(stream);
    return code ? code : fake_query_stream(stream);
}

API CUresult cuStreamQuery(CUstream stream)
{
    ENTRY(cuStreamQuery, stream, stream_query(stream));
}

static CUresult stream_synchronize(CUstream handle)
{
    struct stream *stream = fake_stream_of(handle);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult code = fake_capture_conflicts(stream);
    return code ? code : fake_force_stream(stream);
}

API CUresult cuStreamSynchronize(CUstream stream)
{
    ENTRY(cuStreamSynchronize, stream, stream_synchronize(stream));
}

/* An event of a capture carries its capture to the stream that waits for it, or closes a branch of it. */
static CUresult wait_captured(struct stream *stream, const struct event *event)
{
    struct capture *capture = fake_capture_of(event->capture);
    if (!capture)
        return CUDA_ERROR_CAPTURED_EVENT;
    if (stream->legacy)
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    if (stream->capture && stream->capture != capture)
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    if (!stream->capture) {
        stream->capture = capture;
        stream->captured = 0;
    }
    stream->unjoined = stream != capture->origin;
    stream->captured++;
    for (struct stream *s = fake.streams; s; s = s->next)
        if (s->id == event->captured_on && s != stream && s->captured == event->captured_at)
            s->unjoined = false;
    return capture->invalidated ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

static CUresult stream_wait_event(CUstream handle, CUevent event_handle, unsigned flags)
{
    struct stream *stream = fake_stream_of(handle);
    struct event *event = fake_handle_get(TAG_EVENT, event_handle);
    if (!stream || !event)
        return CUDA_ERROR_INVALID_HANDLE;
    if (flags > 1)
        return CUDA_ERROR_INVALID_VALUE;
    if (event->capture)
        return wait_captured(stream, event);
    if (!event->record) /* never recorded: nothing to wait for */
        return CUDA_SUCCESS;
    if (stream->capture) {
        fake_capture_invalidate(stream->capture);
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    CUresult code = fake_admit(stream);
    if (code || event->record->done)
        return code;
    struct op *op = fake_op_new(OP_WAIT, stream);
    fake_op_needs(op, event->record);
    fake_op_issue(op);
    return CUDA_SUCCESS;
}

API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags)
{
    ENTRY(cuStreamWaitEvent, stream, stream_wait_event(stream, event, flags));
}

static CUresult stream_get_ctx(CUstream handle, CUcontext *out)
{
    struct stream *stream = fake_stream_of(handle);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = stream->context;
    return CUDA_SUCCESS;
}

API CUresult cuStreamGetCtx(CUstream stream, CUcontext *out)
{
    ENTRY(cuStreamGetCtx, stream, stream_get_ctx(stream, out));
}

static CUresult stream_get_flags(CUstream handle, unsigned *out)
{
    struct stream *stream = fake_stream_of(handle);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = stream->flags;
    return CUDA_SUCCESS;
}

API CUresult cuStreamGetFlags(CUstream stream, unsigned *out)
{
    ENTRY(cuStreamGetFlags, stream, stream_get_flags(stream, out));
}

static CUresult event_create(CUevent *out, unsigned flags)
{
    if (!out || flags > 7)
        return CUDA_ERROR_INVALID_VALUE;
    struct event *event = fake_allocate(1, sizeof *event);
    event->context = fake_current();
    *out = fake_handle_new(TAG_EVENT, event);
    return CUDA_SUCCESS;
}

API CUresult cuEventCreate(CUevent *out, unsigned flags)
{
    ENTRY(cuEventCreate, NULL, event_create(out, flags));
}

static CUresult event_destroy(CUevent handle)
{
    struct event *event = fake_handle_get(TAG_EVENT, handle);
    if (!event)
        return CUDA_ERROR_INVALID_HANDLE;
    fake_handle_drop(handle);
    event_free(event);
    return CUDA_SUCCESS;
}

API CUresult cuEventDestroy_v2(CUevent event)
{
    ENTRY(cuEventDestroy, NULL, event_destroy(event));
}

static CUresult event_record(CUevent handle, CUstream stream_handle)
{
    struct event *event = fake_handle_get(TAG_EVENT, handle);
    struct stream *stream = fake_stream_of(stream_handle);
    if (!event || !stream || event->context != stream->context)
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult code = fake_admit(stream);
    if (code && code != ADMIT_CAPTURED)
        return code;
    fake_op_drop(event->record);
    event->record = NULL;
    event->capture = 0;
    if (code == ADMIT_CAPTURED) {
        event->capture = stream->capture->id;
        event->captured_on = stream->id;
        event->captured_at = stream->captured;
        return CUDA_SUCCESS;
    }
    event->record = fake_op_new(OP_RECORD, stream);
    fake_op_keep(event->record);
    fake_op_issue(event->record);
    return CUDA_SUCCESS;
}

API CUresult cuEventRecord(CUevent event, CUstream stream)
{
    ENTRY(cuEventRecord, stream, event_record(event, stream));
}

/* Asking after an event of a capture conflicts with the capture in any mode. */
static CUresult event_of(CUevent handle, struct event **out)
{
    *out = fake_handle_get(TAG_EVENT, handle);
    if (!*out)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!(*out)->capture)
        return CUDA_SUCCESS;
    struct capture *capture = fake_capture_of((*out)->capture);
    if (capture)
        fake_capture_invalidate(capture);
    return CUDA_ERROR_CAPTURED_EVENT;
}

static CUresult event_query(CUevent handle)
{
    struct event *event;
    CUresult code = event_of(handle, &event);
    return code ? code : fake_query(event->record);
}

API CUresult cuEventQuery(CUevent event)
{
    ENTRY(cuEventQuery, NULL, event_query(event));
}

static CUresult event_synchronize(CUevent handle)
{
    struct event *event;
    CUresult code = event_of(handle, &event);
    if (code)
        return code;
    struct op *goal = event->record;
    return fake_force(&goal, 1);
}

API CUresult cuEventSynchronize(CUevent event)
{
    ENTRY(cuEventSynchronize, NULL, event_synchronize(event));
}

API CUresult cuStreamDestroy(CUstream) API_ALIAS(cuStreamDestroy_v2);
API CUresult cuEventDestroy(CUevent) API_ALIAS(cuEventDestroy_v2);
