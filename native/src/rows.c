/* rows.c: copies between the rows of one memory and places anywhere else, in the caller's thread: what a cache in host
 * memory does for every hit and every write. Needs no engine. */
#include <errno.h>
#include <string.h>

#include "internal.h"

enum { LINE = 64, AHEAD = 16 * LINE };

/* Rows lie all over a memory that is larger than any cache, and the hardware's own prefetchers stop at the end of a page:
 * unless the start of the next copy is asked for during this one, each begins with a wait for memory. */
static void fetch_ahead(const char *source, const char *target, uint64_t nbytes)
{
    for (uint64_t i = 0; i < nbytes && i < AHEAD; i += LINE) {
        __builtin_prefetch(source + i, 0);
        __builtin_prefetch(target + i, 1);
    }
}

static char *row_at(void *memory, int64_t row, uint64_t nbytes)
{
    return (char *)memory + (uint64_t)row * nbytes;
}

static char *place_at(int64_t address)
{
    return (char *)(uintptr_t)address;
}

int akv_copy_rows(void *memory, uint64_t memory_nbytes, uint64_t row_nbytes, const int64_t *rows, const int64_t *places,
                  uint64_t count, int inward)
{
    if (count == 0)
        return 0;
    if (!memory || row_nbytes == 0 || !rows || !places)
        return -EINVAL;
    uint64_t row_count = memory_nbytes / row_nbytes;
    for (uint64_t i = 0; i < count; i++) /* all of them before the first byte moves */
        if (rows[i] < 0 || (uint64_t)rows[i] >= row_count || places[i] == 0)
            return -ERANGE;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t next = i + 1 < count ? i + 1 : i;
        char *row = row_at(memory, rows[i], row_nbytes), *next_row = row_at(memory, rows[next], row_nbytes);
        char *place = place_at(places[i]), *next_place = place_at(places[next]);
        if (inward) {
            fetch_ahead(next_place, next_row, row_nbytes);
            memcpy(row, place, row_nbytes);
        } else {
            fetch_ahead(next_row, next_place, row_nbytes);
            memcpy(place, row, row_nbytes);
        }
    }
    return 0;
}
