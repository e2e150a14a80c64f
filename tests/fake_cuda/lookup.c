/* lookup.c: where each entry point is, for cuGetProcAddress. The declarations here say only that there is something at
 * the address: the real ones are where the functions are. */
#include "fake.h"

#define X(name, symbol, since, rules) extern const char symbol[];
FAKE_ENTRIES(X)
#undef X
extern const char fake_memcpy_batch_async_12080[];

static const struct {
    const char *address;
    int since;
} found_at[ENTRY_COUNT] = {
#define X(name, symbol, since, rules) {symbol, since},
    FAKE_ENTRIES(X)
#undef X
};

enum { BATCH_COPY_SINCE = 12080 };

/* The form of an entry point that a program written for CUDA `version` expects, or NULL. */
const void *fake_address_of(int entry, int version)
{
    if (version >= found_at[entry].since)
        return found_at[entry].address;
    bool older_form = entry == ENTRY_cuMemcpyBatchAsync && version >= BATCH_COPY_SINCE;
    return older_form ? fake_memcpy_batch_async_12080 : NULL;
}
