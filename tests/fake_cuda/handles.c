/* handles.c: numbers that stand for objects. A handle is a tag, a generation and a place in a table; the generation
 * moves on when the handle is dropped, so a stale one never finds what took its place. */
#include <stdlib.h>
#include <string.h>

#include "fake.h"

struct slot {
    void *object;
    uint32_t generation;
    int tag;
};

static struct slot *slots;
static uint32_t slot_count, slot_room;
static uint32_t *free_slots;
static uint32_t free_count;

static uint32_t slot_take(void)
{
    if (free_count)
        return free_slots[--free_count];
    if (slot_count == slot_room) {
        slot_room = slot_room ? 2 * slot_room : 256;
        slots = realloc(slots, slot_room * sizeof *slots);
        free_slots = realloc(free_slots, slot_room * sizeof *free_slots);
        if (!slots || !free_slots)
            abort();
        memset(slots + slot_count, 0, (slot_room - slot_count) * sizeof *slots);
    }
    return slot_count++;
}

void *fake_handle_new(int tag, void *object)
{
    uint32_t index = slot_take();
    struct slot *slot = &slots[index];
    slot->object = object;
    slot->tag = tag;
    slot->generation = (slot->generation + 1) & 0xffffff;
    return (void *)((uint64_t)tag << 56 | (uint64_t)slot->generation << 24 | (index + 1));
}

static struct slot *slot_of(const void *handle)
{
    uint64_t bits = (uint64_t)handle;
    uint32_t index = (bits & 0xffffff) - 1;
    if (index >= slot_count)
        return NULL;
    struct slot *slot = &slots[index];
    bool matches = slot->object && (bits >> 24 & 0xffffff) == slot->generation && (int)(bits >> 56) == slot->tag;
    return matches ? slot : NULL;
}

void *fake_handle_get(int tag, const void *handle)
{
    struct slot *slot = slot_of(handle);
    return slot && slot->tag == tag ? slot->object : NULL;
}

void fake_handle_drop(const void *handle)
{
    struct slot *slot = slot_of(handle);
    if (!slot)
        return;
    slot->object = NULL;
    free_slots[free_count++] = (uint32_t)(slot - slots);
}

int64_t fake_handles_live(int tag)
{
    int64_t live = 0;
    for (uint32_t i = 0; i < slot_count; i++)
        live += slots[i].object && slots[i].tag == tag;
    return live;
}

void fake_handles_each(int tag, void (*visit)(void *object))
{
    for (uint32_t i = 0; i < slot_count; i++)
        if (slots[i].object && slots[i].tag == tag)
            visit(slots[i].object);
}

void fake_handles_reset(void)
{
    free_count = 0;
    for (uint32_t i = slot_count; i-- > 0;) {
        slots[i].object = NULL;
        free_slots[free_count++] = i;
    }
}
