/* Shared by the tests of memory that the program maps itself: a range of the program, and handles that it maps there. */
#ifndef TMS_TESTS_HANDLES_FIXTURE_H
#define TMS_TESTS_HANDLES_FIXTURE_H

#include "support.h"

#include <string.h>

#include "core/allocation/orphans.h"

enum { PIECES = 4 };
#define PIECE_BYTES (2 * MIB)

/* An expandable segment: reserved addresses, and the handles that are mapped there. */
typedef struct program {
    fixture_t *fixture;
    uint64_t base;
    uint64_t handles[PIECES];
} program_t;

static inline uint64_t place(const program_t *program, int piece) { return program->base + (uint64_t)piece * PIECE_BYTES; }

static inline program_t reserve(fixture_t *f) {
    program_t program = {.fixture = f};
    CUdeviceptr base = 0;
    assert_int_equal(f->cuda->cuMemAddressReserve(&base, PIECES * PIECE_BYTES, 0, 0, 0), CUDA_SUCCESS);
    program.base = base;
    return program;
}

static inline uint64_t create_on(program_t *program, int device, const char *tag, tms_backup_kind_t backup) {
    const tms_region_settings_t settings = {.managed = true, .tag = tag, .backup = (int32_t)backup};
    tms_region_t region;
    tms_error_t error;
    uint64_t number = 0;
    ASSERT_OK(tms_region_from_settings(&program->fixture->regions, &settings, &region, &error), error);
    ASSERT_OK(tms_handles_create(&program->fixture->saver, &region, PIECE_BYTES, device, &number, &error), error);
    assert_true(tms_handles_is_ours(number));
    return number;
}

static inline uint64_t create(program_t *program, tms_backup_kind_t backup) {
    return create_on(program, 0, "default", backup);
}

static inline void map_handle(program_t *program, int piece, uint64_t number) {
    bool busy = true;
    tms_error_t error;
    ASSERT_OK(tms_handles_map(&program->fixture->saver, place(program, piece), PIECE_BYTES, number, &busy, &error), error);
    assert_false(busy);
    program->handles[piece] = number;
}

static inline void map(program_t *program, int piece, tms_backup_kind_t backup) {
    map_handle(program, piece, create(program, backup));
}

static inline void map_all(program_t *program, tms_backup_kind_t backup) {
    for (int piece = 0; piece < PIECES; piece++) {
        map(program, piece, backup);
        fill(place(program, piece), PIECE_BYTES, (uint32_t)piece + 1);
    }
}

static inline void unmap(program_t *program, int piece) {
    tms_saver_t *saver = &program->fixture->saver;
    tms_error_t error;
    ASSERT_OK(tms_handles_unmap(saver, place(program, piece), PIECE_BYTES, &error), error);
    ASSERT_OK(tms_handles_release(saver, program->handles[piece], &error), error);
    program->handles[piece] = 0;
}

static inline void free_addresses(const program_t *program) {
    const uint64_t bytes = PIECES * PIECE_BYTES;
    if (!tms_orphans_keep(&program->fixture->saver, program->base, bytes))
        assert_int_equal(program->fixture->cuda->cuMemAddressFree(program->base, bytes), CUDA_SUCCESS);
}

static inline void end(program_t *program) {
    for (int piece = 0; piece < PIECES; piece++) {
        if (program->handles[piece]) unmap(program, piece);
    }
    free_addresses(program);
    assert_nothing_waits(&program->fixture->saver);
}

static inline uint64_t used(void) {
    tms_sim_usage_t usage;
    simulator()->usage(0, &usage);
    return usage.physical_bytes;
}

#endif
