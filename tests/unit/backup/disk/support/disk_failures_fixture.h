/* Shared by the tests of failed copies between disk and device, in addition to disk_copy_fixture.h. */
#ifndef TMS_TESTS_DISK_FAILURES_FIXTURE_H
#define TMS_TESTS_DISK_FAILURES_FIXTURE_H

#include "support.h"

#include <sys/ioctl.h>

#include "captured_stderr.h"
#include "disk_copy_fixture.h"

enum { TEXT_BYTES = 8192 };
/* More than the disk's queue holds, fewer than there are buffers. The last is too small for direct I/O. */
enum { PIECES = 10 };
static const uint64_t BYTES = (PIECES - 1) * BUFFER + 77;

static uint64_t allocate_filled(fixture_t *f, uint32_t seed) {
    uint64_t address = allocate(f, "a", TMS_BACKUP_NONE, BYTES);
    fill(address, BYTES, seed);
    return address;
}

static void assert_logged(const char *logged, unsigned lines, const char *text) {
    if (count_lines(logged) != lines || (lines > 0 && !strstr(logged, text)))
        fail_msg("not %u lines with '%s': %s", lines, text, logged);
}

/* ---- errors ---- */

#define COPIES(test) cmocka_unit_test_setup_teardown(test, setup_disk_copies, teardown_disk_copies)

#endif
