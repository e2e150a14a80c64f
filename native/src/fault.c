/* fault.c: which fault, if any, meets this ask. Rules are read-only; the counters are the reactor's. */
#include "internal.h"

const akv_fault *akv_fault_pick(struct akv_reactor *r, uint32_t kind)
{
    const struct akv_engine *e = r->engine;
    uint64_t sequence = r->fault_sequence[kind]++;
    for (uint32_t i = 0; i < e->options.fault_count; i++) {
        const akv_fault *fault = &e->faults[i];
        if (fault->kind >= 0 && (uint32_t)fault->kind != kind)
            continue;
        if (sequence < fault->phase || (sequence - fault->phase) % fault->every || r->fault_used[i] >= fault->times)
            continue;
        r->fault_used[i]++;
        AKV_COUNT(r, faults, 1);
        return fault;
    }
    return NULL;
}

int64_t akv_fault_delay_ns(struct akv_reactor *r, const akv_fault *fault)
{
    int64_t most = (int64_t)fault->value * 1000;
    if (fault->action == AKV_FAULT_DELAY || most == 0)
        return most;
    r->fault_random = r->fault_random * 6364136223846793005ull + 1442695040888963407ull; /* Knuth's MMIX constants */
    return (int64_t)((r->fault_random >> 33) % (uint64_t)most);
}
