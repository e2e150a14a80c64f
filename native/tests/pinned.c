/* pinned.c: copies between a region and device memory are listed only if every one of them lies within both. */
#include "check.h"

enum { PIECE = 64, REGION = 1024, DEVICE = 512 };
static const uint64_t BASE = 0x700000000000ull;

static int list(akv_copy *copies, uint32_t count, const int64_t *offsets, const int64_t *places)
{
    return akv_pinned_copies(copies, count, offsets, REGION, BASE, DEVICE, places, PIECE, 1);
}

static void what_fits_is_listed(uint32_t source)
{
    akv_copy copies[8];
    int64_t offsets[8] = {0, REGION - PIECE, 1, 64, 128, 3, 3, 900}, places[8] = {DEVICE - PIECE, 0, 5, 64, 448, 7, 7, 9};
    CHECK_EQ(list(copies, 8, offsets, places), 1);
    for (int i = 0; i < 8; i++) {
        CHECK_EQ(copies[i].address, BASE + (uint64_t)places[i]);
        CHECK_EQ(copies[i].op_offset, (uint32_t)offsets[i]);
        CHECK_EQ(copies[i].nbytes, PIECE);
    }
    CHECK_EQ(list(copies, 8, offsets, NULL), 1); /* packed: 8 pieces of 64 bytes are 512 */
    for (int i = 0; i < 8; i++)
        CHECK_EQ(copies[i].address, BASE + (uint64_t)i * PIECE);
    CHECK_EQ(list(copies, 7, offsets, NULL), 0);
    CHECK_EQ(list(copies, 0, offsets, places), 1);
}

static void what_passes_an_end_is_not(uint32_t source)
{
    static const int64_t bad_offsets[] = {-1, REGION - PIECE + 1, REGION, INT64_MAX, INT64_MIN};
    static const int64_t bad_places[] = {-1, DEVICE - PIECE + 1, DEVICE, INT64_MAX, INT64_MIN};
    akv_copy copies[3];
    for (int bad = 0; bad < 5; bad++)
        for (int at = 0; at < 3; at++) {
            int64_t offsets[3] = {0, 64, 128}, places[3] = {0, 64, 128};
            offsets[at] = bad_offsets[bad];
            CHECK_EQ(list(copies, 3, offsets, places), 0);
            offsets[at] = 0;
            places[at] = bad_places[bad];
            CHECK_EQ(list(copies, 3, offsets, places), 0);
        }
}

static void sizes_that_cannot_be_are_refused(uint32_t source)
{
    akv_copy copies[1];
    int64_t zero = 0;
    CHECK_EQ(akv_pinned_copies(NULL, 1, &zero, REGION, BASE, DEVICE, &zero, PIECE, 1), 0);
    CHECK_EQ(akv_pinned_copies(copies, 1, NULL, REGION, BASE, DEVICE, &zero, PIECE, 1), 0);
    CHECK_EQ(akv_pinned_copies(copies, 1, &zero, REGION, BASE, DEVICE, &zero, 0, 1), 0);
    CHECK_EQ(akv_pinned_copies(copies, 1, &zero, PIECE - 1, BASE, DEVICE, &zero, PIECE, 1), 0);
    CHECK_EQ(akv_pinned_copies(copies, 1, &zero, REGION, BASE, PIECE - 1, &zero, PIECE, 1), 0);
    CHECK_EQ(akv_pinned_copies(copies, 1, &zero, (1ull << 31) + 1, BASE, DEVICE, &zero, PIECE, 1), 0);
}

/* The region is larger than what 32 bits of bytes reach: its offsets are counted in pages. */
static void a_large_region_is_counted_in_pages(uint32_t source)
{
    static const uint64_t huge = 1ull << 40;
    akv_copy copies[2];
    int64_t offsets[2] = {0, (int64_t)huge - PAGE}, places[2] = {0, DEVICE - PIECE};
    CHECK_EQ(akv_pinned_copies(copies, 2, offsets, huge, BASE, DEVICE, places, PIECE, PAGE), 1);
    CHECK_EQ(copies[1].op_offset, (huge - PAGE) / PAGE);
    CHECK_EQ(akv_pinned_copies(copies, 2, offsets, huge, BASE, DEVICE, places, PIECE, 1), 0);
    CHECK_EQ(akv_pinned_copies(copies, 2, offsets, huge, BASE, DEVICE, places, PIECE, 0), 0);
    offsets[1] += 64; /* within, but no whole page */
    CHECK_EQ(akv_pinned_copies(copies, 2, offsets, huge, BASE, DEVICE, places, PIECE, PAGE), 0);
    offsets[1] = huge;
    CHECK_EQ(akv_pinned_copies(copies, 2, offsets, huge, BASE, DEVICE, places, PIECE, PAGE), 0);
}

static void an_engine_without_a_device_answers_no(uint32_t source)
{
    struct rig rig;
    rig_make(&rig, source);
    rig_start(&rig);
    CHECK_EQ(akv_engine_is_device_memory(rig.engine, BASE, 1, 0), 0);
    CHECK_EQ(akv_engine_fence(rig.engine, NULL, &rig), 0);
    uint8_t record[64];
    int64_t offset = 0, place = 0;
    CHECK_EQ(akv_engine_copy_pinned(rig.engine, 0, AKV_LOAD, 0, 0, BASE, REGION, &offset, BASE, DEVICE, &place, 1, PIECE, 0, 0,
                                    record, sizeof record),
             -EDOM);
    CHECK_EQ(akv_engine_copy_pinned(rig.engine, 0, AKV_READ, 0, 0, BASE, REGION, &offset, BASE, DEVICE, &place, 1, PIECE, 0, 0,
                                    record, sizeof record),
             -EINVAL);
    CHECK_EQ(akv_engine_copy_pinned(rig.engine, 0, AKV_LOAD, 0, 0, BASE, REGION, &offset, BASE, DEVICE, &place, 1, PIECE, 0, 0,
                                    record, sizeof record - 1),
             -EINVAL);
    CHECK_EQ(akv_engine_copy_pinned(rig.engine, 0, AKV_LOAD, 0, 0, BASE, REGION, &offset, BASE, DEVICE, &place, 0, PIECE, 0, 0,
                                    record, sizeof record),
             -EINVAL);
    rig_end(&rig);
}

int main(void)
{
    const struct test tests[] = {
        {"what fits is listed", what_fits_is_listed},
        {"what passes an end is not", what_passes_an_end_is_not},
        {"sizes that cannot be are refused", sizes_that_cannot_be_are_refused},
        {"a large region is counted in pages", a_large_region_is_counted_in_pages},
        {"an engine without a device answers no", an_engine_without_a_device_answers_no},
        {0},
    };
    return run_tests(tests);
}
