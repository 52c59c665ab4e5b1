/* Shared by the tests of publish and adopt: calls of both, and what they leave. Included once in a program, before
 * everything else. */
#ifndef TMS_TEST_PUBLISH_FIXTURE_H
#define TMS_TEST_PUBLISH_FIXTURE_H

#include "shared_store.h"

#include "backup/shared/store.h"
#include "core/transition/adopt.h"
#include "core/transition/publish.h"

enum { MAX_PIECES = 8, MANIFEST_BYTES = 4096 };
static const char contents[] = "{\"format\": 1}";

static inline tms_shared_piece_t piece_at(uint64_t address, uint64_t bytes) {
    return (tms_shared_piece_t){.address = address, .bytes = bytes};
}

static inline tms_status_t publish(fixture_t *f, const char *name, const tms_shared_piece_t *pieces, size_t count,
                                   uint64_t *written, tms_error_t *error) {
    const tms_selection_t selection = {0};
    return tms_publish_perform(&f->saver, &selection, pieces, count, name, contents, written, error);
}

static inline void publish_one(fixture_t *f, const char *name, uint64_t address, uint64_t expected) {
    tms_error_t error;
    uint64_t written;
    const tms_shared_piece_t piece = piece_at(address, BYTES);
    ASSERT_OK(publish(f, name, &piece, 1, &written, &error), error);
    assert_int_equal(written, expected);
}

static inline tms_status_t adopt(fixture_t *f, const tms_shared_piece_t *pieces, size_t count, const char *names,
                                 size_t *missing, tms_error_t *error) {
    const tms_selection_t selection = {0};
    return tms_adopt_perform(&f->saver, &selection, pieces, count, names, missing, error);
}

static inline void adopt_all(fixture_t *f, const tms_shared_piece_t *pieces, size_t count, const char *names) {
    tms_error_t error;
    size_t missing;
    ASSERT_OK(adopt(f, pieces, count, names, &missing, &error), error);
    assert_int_equal(missing, count);
}

/* The names of the objects in the manifest of a published name, one behind the other. */
static inline const char *objects_of(const char *name) {
    static char text[MANIFEST_BYTES], names[MAX_PIECES * TMS_OBJECT_NAME_DIGITS + 1];
    char path[2 * PATH_BYTES], *at = text + strlen("{\"objects\":[");
    snprintf(path, sizeof path, "%s/names/%s/manifest.json", folder, name);
    const int fd = open(path, O_RDONLY);
    assert_true(fd >= 0);
    const ssize_t bytes = read(fd, text, sizeof text - 1);
    assert_true(bytes > 0);
    text[bytes] = 0;
    assert_int_equal(close(fd), 0);
    assert_memory_equal(text, "{\"objects\":[", strlen("{\"objects\":["));
    assert_string_equal(strstr(text, "],\n"), "],\n\"contents\":{\"format\": 1}}\n");
    names[0] = 0;
    for (; *at == '"' || *at == ','; at += TMS_OBJECT_NAME_DIGITS + 1) {
        if (*at == ',') at++;
        strncat(names, ++at, TMS_OBJECT_NAME_DIGITS);
    }
    return names;
}

/* Ends the links of this process, as its end would. */
static inline void restart(fixture_t *f) {
    tms_shared_store_drop_kept(store_of(f));
    assert_int_equal(held(f), 0);
}

#endif
