/* capture.c: stream capture, as far as other threads feel it. A capture takes the operations of its streams away, and
 * forbids some threads the calls that might depend on what was not carried out. A forbidden call fails, and ends the
 * capture too: that is what an event query from a second thread did to a capture in global mode on real hardware. */
#include <stdlib.h>

#include "fake.h"

static uint8_t graph; /* graphs have no content: one object stands for all of them */

struct capture *fake_capture_of(uint64_t id)
{
    struct capture *capture = fake.captures;
    while (capture && capture->id != id)
        capture = capture->next;
    return capture;
}

void fake_capture_invalidate(struct capture *capture)
{
    fake.captures_invalidated += !capture->invalidated;
    capture->invalidated = true;
}

void fake_captures_reset(void)
{
    while (fake.captures) {
        struct capture *capture = fake.captures;
        fake.captures = capture->next;
        free(capture);
    }
}

/* The rule of cuThreadExchangeStreamCaptureMode. */
static bool prohibits(const struct capture *capture, const struct thread_state *t)
{
    if (t->capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return false;
    if (capture->thread == t->id)
        return capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    return t->capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

/* May this thread make a call that is unsafe during captures? */
CUresult fake_capture_prohibits(void)
{
    CUresult code = CUDA_SUCCESS;
    for (struct capture *c = fake.captures; c; c = c->next)
        if (prohibits(c, fake_thread())) {
            fake_capture_invalidate(c);
            code = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    return code;
}

/* The legacy stream is tied to every blocking stream, so it is out of use while one of them captures. */
static struct capture *blocking_capture(const struct fake_context *context)
{
    for (struct stream *s = fake.streams; s; s = s->next)
        if (s->context == context && s->capture && fake_is_blocking(s))
            return s->capture;
    return NULL;
}

static CUresult legacy_conflicts(const struct stream *stream)
{
    struct capture *capture = stream->legacy ? blocking_capture(stream->context) : NULL;
    if (!capture)
        return CUDA_SUCCESS;
    fake_capture_invalidate(capture);
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
}

/* For an operation that is about to be queued on `stream`. */
CUresult fake_admit(struct stream *stream)
{
    if (!stream->capture)
        return legacy_conflicts(stream);
    if (stream->capture->invalidated)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    stream->captured++;
    stream->unjoined = stream != stream->capture->origin;
    return ADMIT_CAPTURED;
}

/* For a host that asks after `stream` or waits for it. */
CUresult fake_capture_conflicts(struct stream *stream)
{
    if (!stream->capture)
        return legacy_conflicts(stream);
    fake_capture_invalidate(stream->capture);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

static CUresult begin_capture(CUstream handle, int mode)
{
    struct stream *stream = fake_stream_of(handle);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream->legacy)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    struct capture *capture = fake_allocate(1, sizeof *capture);
    capture->id = ++fake.capture_ids;
    capture->mode = mode;
    capture->thread = fake_thread()->id;
    capture->origin = stream;
    capture->next = fake.captures;
    fake.captures = capture;
    stream->capture = capture;
    stream->captured = 0;
    stream->unjoined = false;
    return CUDA_SUCCESS;
}

API CUresult cuStreamBeginCapture_v2(CUstream stream, int mode)
{
    ENTRY(cuStreamBeginCapture, stream, begin_capture(stream, mode));
}

static void unlink_capture(struct capture *capture)
{
    struct capture **link = &fake.captures;
    while (*link != capture)
        link = &(*link)->next;
    *link = capture->next;
    free(capture);
}

/* Lets all its streams go; true when each branch had come back to the origin. */
static bool release_streams(const struct capture *capture)
{
    bool joined = true;
    struct stream *next;
    for (struct stream *s = fake.streams; s; s = next) {
        next = s->next;
        if (s->capture != capture)
            continue;
        joined &= !s->unjoined;
        s->capture = NULL;
        fake_stream_reap(s);
    }
    return joined;
}

/* `stream` is being destroyed. Without its origin nobody could end the capture. */
void fake_capture_leave(struct stream *stream)
{
    struct capture *capture = stream->capture;
    if (!capture)
        return;
    fake_capture_invalidate(capture);
    stream->capture = NULL;
    if (capture->origin != stream)
        return;
    release_streams(capture);
    unlink_capture(capture);
}

static CUresult end_capture(CUstream handle, CUgraph *out)
{
    struct stream *stream = fake_stream_of(handle);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    struct capture *capture = stream->capture;
    if (!out || !capture)
        return out ? CUDA_ERROR_ILLEGAL_STATE : CUDA_ERROR_INVALID_VALUE;
    *out = NULL;
    if (capture->origin != stream)
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != fake_thread()->id)
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    bool invalidated = capture->invalidated;
    bool joined = release_streams(capture);
    unlink_capture(capture);
    if (invalidated || !joined)
        return invalidated ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    *out = fake_handle_new(TAG_GRAPH, &graph);
    return CUDA_SUCCESS;
}

API CUresult cuStreamEndCapture(CUstream stream, CUgraph *out)
{
    ENTRY(cuStreamEndCapture, stream, end_capture(stream, out));
}

static CUresult is_capturing(CUstream handle, int *out)
{
    struct stream *stream = fake_stream_of(handle);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream->legacy && blocking_capture(stream->context)) /* an answer, not an offence: the capture lives on */
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    *out = !stream->capture ? CU_STREAM_CAPTURE_STATUS_NONE
           : stream->capture->invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                          : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
}

API CUresult cuStreamIsCapturing(CUstream stream, int *out)
{
    ENTRY(cuStreamIsCapturing, stream, is_capturing(stream, out));
}

static CUresult exchange_mode(int *mode)
{
    if (!mode || *mode < CU_STREAM_CAPTURE_MODE_GLOBAL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    struct thread_state *t = fake_thread();
    int old = t->capture_mode;
    t->capture_mode = *mode;
    *mode = old;
    return CUDA_SUCCESS;
}

API CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
    ENTRY(cuThreadExchangeStreamCaptureMode, NULL, exchange_mode(mode));
}

static CUresult graph_destroy(CUgraph handle)
{
    if (!fake_handle_get(TAG_GRAPH, handle))
        return CUDA_ERROR_INVALID_VALUE;
    fake_handle_drop(handle);
    return CUDA_SUCCESS;
}

API CUresult cuGraphDestroy(CUgraph handle)
{
    ENTRY(cuGraphDestroy, NULL, graph_destroy(handle));
}

API CUresult cuStreamBeginCapture(CUstream, int) API_ALIAS(cuStreamBeginCapture_v2);
