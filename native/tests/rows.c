/* rows.c: copies to and from rows, against the plainest possible copy; and what is refused before a byte has moved. */
#include "check.h"

enum { ROWS = 37, CHOSEN = 11 };

static uint64_t state = 1;

static uint64_t draw(uint64_t below)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % below;
}

static void randomise(uint8_t *memory, uint64_t nbytes)
{
    for (uint64_t i = 0; i < nbytes; i++)
        memory[i] = (uint8_t)draw(256);
}

/* CHOSEN different rows, and a place in `outside` for each, with a gap of one byte between any two. */
static void choose(uint8_t *outside, uint64_t row_nbytes, int64_t *rows, int64_t *places)
{
    uint64_t first = draw(ROWS);
    for (uint64_t i = 0; i < CHOSEN; i++) {
        rows[i] = (int64_t)((first + i * 7) % ROWS); /* 7 and 37 have no common factor */
        places[i] = (int64_t)(uintptr_t)(outside + (CHOSEN - 1 - i) * (row_nbytes + 1) + 1);
    }
}

static void compare(uint64_t row_nbytes)
{
    uint64_t nbytes = ROWS * row_nbytes, outside_nbytes = CHOSEN * (row_nbytes + 1) + 1;
    uint8_t *memory = malloc(nbytes), *outside = malloc(outside_nbytes);
    uint8_t *expected = malloc(nbytes), *expected_outside = malloc(outside_nbytes);
    int64_t rows[CHOSEN], places[CHOSEN];
    CHECK(memory && outside && expected && expected_outside);
    for (int inward = 0; inward < 2; inward++) {
        randomise(memory, nbytes);
        randomise(outside, outside_nbytes);
        memcpy(expected, memory, nbytes);
        memcpy(expected_outside, outside, outside_nbytes);
        choose(outside, row_nbytes, rows, places);
        for (uint64_t i = 0; i < CHOSEN; i++)
            for (uint64_t byte = 0; byte < row_nbytes; byte++) {
                uint64_t row = (uint64_t)rows[i] * row_nbytes + byte;
                uint64_t place = (uint64_t)((uint8_t *)(uintptr_t)places[i] - outside) + byte;
                if (inward)
                    expected[row] = outside[place];
                else
                    expected_outside[place] = memory[row];
            }
        CHECK_EQ(akv_copy_rows(memory, nbytes, row_nbytes, rows, places, CHOSEN, inward), 0);
        CHECK(memcmp(memory, expected, nbytes) == 0);
        CHECK(memcmp(outside, expected_outside, outside_nbytes) == 0);
    }
    free(memory), free(outside), free(expected), free(expected_outside);
}

static void refuse(void)
{
    uint8_t memory[4 * 100 + 99], outside[100] = {7}; /* four rows and not quite a fifth */
    int64_t rows[2] = {0, 3}, places[2] = {(int64_t)(uintptr_t)outside, (int64_t)(uintptr_t)outside};
    static const int64_t wrong[] = {4, -1, INT64_MAX, INT64_MIN};
    memset(memory, 9, sizeof memory);
    CHECK_EQ(akv_copy_rows(NULL, sizeof memory, 100, rows, places, 2, 0), -EINVAL);
    CHECK_EQ(akv_copy_rows(memory, sizeof memory, 0, rows, places, 2, 0), -EINVAL);
    CHECK_EQ(akv_copy_rows(memory, sizeof memory, 100, NULL, places, 2, 0), -EINVAL);
    CHECK_EQ(akv_copy_rows(memory, sizeof memory, 100, rows, NULL, 2, 0), -EINVAL);
    CHECK_EQ(akv_copy_rows(memory, sizeof memory, UINT64_MAX, rows, places, 2, 0), -ERANGE);
    for (uint64_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        rows[1] = wrong[i];
        CHECK_EQ(akv_copy_rows(memory, sizeof memory, 100, rows, places, 2, 0), -ERANGE);
        CHECK_EQ(akv_copy_rows(memory, sizeof memory, 100, rows, places, 2, 1), -ERANGE);
    }
    rows[1] = 3, places[1] = 0;
    CHECK_EQ(akv_copy_rows(memory, sizeof memory, 100, rows, places, 2, 0), -ERANGE);
    CHECK(outside[0] == 7 && memory[0] == 9); /* the first row was right, and not copied */
    CHECK_EQ(akv_copy_rows(NULL, 0, 0, NULL, NULL, 0, 0), 0);
}

int main(void)
{
    static const uint64_t sizes[] = {1, 8, 63, 64, 65, 1000, 1024, 4096, 70000};
    for (uint64_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        compare(sizes[i]);
    refuse();
    return 0;
}
