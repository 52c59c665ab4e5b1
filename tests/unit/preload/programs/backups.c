/* Scenarios of test_memory.py: backups of managed memory, as programs set and see them through the C functions. */

#include <sched.h>

#include "support.h"

static void check_cpu_backup(const char *backend, tms_backup_kind_t kind) {
    TMS(tms_set_interesting_region)(true);
    TMS(tms_set_cpu_backup_backend)(backend); /* before the backup is enabled: stored */
    CHECK(!TMS(tms_get_enable_cpu_backup)());
    TMS(tms_set_enable_cpu_backup)(true);
    CHECK(TMS(tms_get_enable_cpu_backup)());
    EQUAL(strcmp(TMS(tms_get_cpu_backup_backend)(), backend), 0);
    unsigned char *address = allocate(5 * MIB);
    EQUAL(segment_of(address).backup, kind);
    fill(address, 5 * MIB, 3);
    CHECK(TMS(tms_get_cpu_backup_pointer)(address, 5 * MIB) == NULL);

    EQUAL(TMS(tms_pause)(NULL), SUCCESS);
    EQUAL(usage_of(0).physical_bytes, 0);
    unsigned char *copy = TMS(tms_get_cpu_backup_pointer)(address, 5 * MIB);
    CHECK(copy != NULL && copy != address && is_filled(copy, 5 * MIB, 3));
    CHECK(TMS(tms_get_cpu_backup_pointer)(address + MIB, MIB) == copy + MIB);
    EQUAL(TMS(tms_resume)(NULL), SUCCESS);
    CHECK(is_filled(address, 5 * MIB, 3));
    CHECK(TMS(tms_get_cpu_backup_pointer)(address, 5 * MIB) == NULL);
    EQUAL(counters().host_backup_bytes, 0);
    while (counters().host_resident_bytes > 0) sched_yield(); /* a thread of the library releases it */
    EQUAL(usage_of(0).host_bytes, 0);
    EQUAL(cudaFree(address), SUCCESS);
}

static void pinned_backup(void) { check_cpu_backup("pinned", TMS_BACKUP_PINNED); }

static void mmap_backup(void) { check_cpu_backup("mmap", TMS_BACKUP_MMAP); }

static void retained_backup(void) {
    TMS(tms_set_retain_cpu_backup)(true);
    CHECK(TMS(tms_get_retain_cpu_backup)());
    TMS(tms_set_interesting_region)(true);
    TMS(tms_set_enable_cpu_backup)(true);
    void *address = allocate(2 * MIB);
    uint8_t *first = NULL;
    for (unsigned cycle = 0; cycle < 3; cycle++) {
        fill(address, 2 * MIB, cycle);
        EQUAL(TMS(tms_pause)(NULL), SUCCESS);
        uint8_t *copy = TMS(tms_get_cpu_backup_pointer)(address, 2 * MIB);
        if (cycle == 0) first = copy;
        CHECK(copy == first && is_filled(copy, 2 * MIB, cycle));
        EQUAL(TMS(tms_resume)(NULL), SUCCESS);
        CHECK(is_filled(address, 2 * MIB, cycle));
        CHECK(TMS(tms_get_cpu_backup_pointer)(address, 2 * MIB) == first);
    }
    EQUAL(cudaFree(address), SUCCESS);
    EQUAL(counters().host_backup_bytes, 0);
}

/* The directory is the program's: the test examines it while the program waits for a line. */
static void disk_backup(void) {
    TMS(tms_set_disk_backup_dir)(getenv("BACKUP_DIRECTORY"));
    TMS(tms_set_interesting_region)(true);
    TMS(tms_set_enable_disk_backup)(true);
    CHECK(TMS(tms_get_enable_disk_backup)());
    void *address = allocate(5 * MIB);
    for (unsigned cycle = 0; cycle < 2; cycle++) {
        fill(address, 5 * MIB, cycle);
        EQUAL(TMS(tms_pause)(NULL), SUCCESS);
        EQUAL(usage_of(0).physical_bytes, 0);
        printf("paused\n");
        fflush(stdout);
        EQUAL(getchar(), '\n');
        EQUAL(TMS(tms_resume)(NULL), SUCCESS);
        CHECK(is_filled(address, 5 * MIB, cycle));
    }
    EQUAL(cudaFree(address), SUCCESS);
    printf("freed\n");
    fflush(stdout);
    EQUAL(getchar(), '\n');
    /* One more, whose file must be removed at the end of the process. */
    address = allocate(2 * MIB);
    EQUAL(TMS(tms_pause)(NULL), SUCCESS);
    printf("left\n");
    fflush(stdout);
    EQUAL(getchar(), '\n');
}

static void both_backups(void) {
    TMS(tms_set_interesting_region)(true);
    TMS(tms_set_cpu_backup_backend)("mmap");
    TMS(tms_set_enable_cpu_backup)(true);
    TMS(tms_set_enable_disk_backup)(true);
    CHECK(!TMS(tms_get_enable_cpu_backup)() && TMS(tms_get_enable_disk_backup)());
    TMS(tms_set_enable_cpu_backup)(false); /* is off already */
    CHECK(TMS(tms_get_enable_disk_backup)());
    TMS(tms_set_enable_cpu_backup)(true);
    CHECK(TMS(tms_get_enable_cpu_backup)() && !TMS(tms_get_enable_disk_backup)());
    EQUAL(strcmp(TMS(tms_get_cpu_backup_backend)(), "mmap"), 0);
    TMS(tms_set_cpu_backup_backend)("floppy");
    EQUAL(strcmp(TMS(tms_get_cpu_backup_backend)(), "mmap"), 0);
    TMS(tms_set_current_tag)("");
    EQUAL(strcmp(TMS(tms_get_current_tag)(), "default"), 0);
    TMS(tms_set_enable_cpu_backup)(false);
    CHECK(!TMS(tms_get_enable_cpu_backup)() && !TMS(tms_get_enable_disk_backup)());
}

MAIN(SCENARIO(pinned_backup), SCENARIO(mmap_backup), SCENARIO(retained_backup), SCENARIO(disk_backup),
     SCENARIO(both_backups))
