/* Shared by the C tests on the simulated GPU: its control functions, and one saver with everything it needs.
 *
 * TMS_CUDA_DRIVER names the simulator's library; without it a test program fails, and does not skip. */
#ifndef TMS_TEST_SUPPORT_H
#define TMS_TEST_SUPPORT_H

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h> /* needs all of the above */

#include "core/allocation/allocation.h"
#include "core/allocation/capture_end.h"
#include "core/allocation/free.h"
#include "core/allocation/handles.h"
#include "core/allocation/reclaim.h"
#include "core/model/inspect.h"
#include "core/model/peers.h"
#include "core/model/saver.h"
#include "core/model/turn.h"
#include "core/transition/pause.h"
#include "core/transition/resume.h"
#include "heap_store.h"
#include "simulator/simulator.h"

#define MIB ((uint64_t)1 << 20)
#define GIB ((uint64_t)1 << 30)

/* The simulator's control functions, found by dlsym. */
#define SIMULATOR_CONTROLS(X)                                                                                               \
    X(void, reset, (int devices, uint64_t memory_bytes))                                                                    \
    X(void, fail_after, (const char *call, uint64_t succeed, uint64_t fail, int code))                                      \
    X(uint64_t, failures_fired, (void))                                                                                     \
    X(uint64_t, calls, (const char *call))                                                                                  \
    X(void, clear_counts, (void))                                                                                           \
    X(uint64_t, calls_in_child, (void))                                                                                     \
    X(void, trace, (int on))                                                                                                \
    X(size_t, read_trace, (char *text, size_t capacity))                                                                    \
    X(void, usage, (int device, tms_sim_usage_t *usage))                                                                    \
    X(int, take_memory, (int device, int64_t bytes))                                                                        \
    X(int, launch_add, (void *stream, uint64_t address, uint64_t bytes, uint8_t value, int gate))                           \
    X(void, open_gate, (int gate))                                                                                          \
    X(void, wait_until_synchronizing, (void))                                                                               \
    X(void, lose_device, (int device, int code))                                                                            \
    X(void, set_bandwidth, (uint64_t bytes_per_second))                                                                     \
    X(void, set_poison_limit, (uint64_t bytes))

typedef struct simulator {
#define SIMULATOR_FIELD(result, name, parameters) result(*name) parameters;
    SIMULATOR_CONTROLS(SIMULATOR_FIELD)
#undef SIMULATOR_FIELD
} simulator_t;

const simulator_t *simulator(void);

enum { OFF, ON }; /* These are the arguments of simulator()->trace. */

typedef struct fixture {
    tms_log_t log;
    tms_config_t config;
    tms_driver_t driver;
    tms_devices_t devices;
    tms_region_defaults_t regions;
    tms_saver_t saver;
    heap_store_t heap;                  /* one of the saver's stores */
    const tms_driver_table_t *cuda;     /* the driver's entry points, loaded */
    const tms_device_table_t *topology; /* loaded */
    int last_gate;                      /* the highest one of launch_behind_gate; teardown opens all up to it */
} fixture_t;

/* One device with 256 MiB, or two, or three; the first device's primary context is active, as in a program that has used
 * it. Teardown frees every segment and fails the test if the simulator still has memory, mappings or reservations. */
int setup_one_device(void **state);
int setup_two_devices(void **state);
int setup_three_devices(void **state);
/* One with 8 GiB, for segments beyond 4 GiB. Their memory costs the host only the written part, and 2 MiB. */
int setup_large_device(void **state);
/* The same with 256 GiB, for runs of many segments. */
int setup_huge_device(void **state);
int teardown(void **state);

/* The parts of the setups and of the teardown, for tests with a fixture of their own: a saver on simulated devices of 256
 * MiB that has not used the driver yet; and its end, which must leave nothing. */
void fixture_begin(fixture_t *fixture, int devices);
void fixture_end(fixture_t *fixture, int devices);

/* The driver's table, for a test that replaces a function in it; the next setup loads another. */
tms_driver_table_t *writable(fixture_t *fixture);

/* Waits until no thread releases host memory, or retries it. */
void settle_host_memory(tms_saver_t *saver);
/* Asserts that the driver has released everything and nothing awaits release: no damaged segment, deferred free or
 * quarantine. */
void assert_nothing_waits(tms_saver_t *saver);

/* A saver call that must succeed: prints the error's message if it does not. */
#define ASSERT_OK(call, error) assert_ok((call), &(error), __FILE__, __LINE__)
void assert_ok(tms_status_t status, const tms_error_t *error, const char *file, int line);

/* An allocation on device 0 with a tag and a backup. */
uint64_t allocate(fixture_t *fixture, const char *tag, tms_backup_kind_t backup, uint64_t bytes);
uint64_t allocate_on(fixture_t *fixture, int device, const char *tag, tms_backup_kind_t backup, uint64_t bytes);

#define ALL_TAGS ((const char *)NULL)
/* These pause or resume all segments, those of one tag, or those of a selection, which are all unless it names tags. */
tms_status_t pause_all(fixture_t *fixture, tms_error_t *error);
tms_status_t resume_all(fixture_t *fixture, tms_error_t *error);
tms_status_t pause_tag(fixture_t *fixture, const char *tag, tms_error_t *error);
tms_status_t resume_tag(fixture_t *fixture, const char *tag, tms_error_t *error);
tms_status_t pause_selected(fixture_t *fixture, const tms_selection_t *selection, tms_error_t *error);
tms_status_t resume_selected(fixture_t *fixture, const tms_selection_t *selection, tms_error_t *error);
/* These do the same and fill in a report. The first two take one tag or ALL_TAGS. */
tms_status_t pause_with_report(fixture_t *fixture, const char *tag, tms_report_t *report, tms_error_t *error);
tms_status_t resume_with_report(fixture_t *fixture, const char *tag, tms_report_t *report, tms_error_t *error);
tms_status_t pause_selected_with_report(fixture_t *fixture, const tms_selection_t *selection, tms_report_t *report,
                                        tms_error_t *error);
tms_status_t resume_selected_with_report(fixture_t *fixture, const tms_selection_t *selection, tms_report_t *report,
                                         tms_error_t *error);

/* Work on `stream`, made here on device 0, that adds 1 to the first MiB at `address` once the gate is open. */
CUstream launch_behind_gate(fixture_t *fixture, int gate, uint64_t address);
void destroy_stream(fixture_t *fixture, CUstream stream);

/* A pause of one tag on a thread of its own, blocked by work behind a gate. begin_pause returns once it waits for the
 * device, and fails the test if it ends without waiting. */
typedef struct held_pause {
    pthread_t thread;
    fixture_t *fixture;
    const char *tag;
    _Atomic bool ended;
    tms_status_t status;
    tms_error_t error;
} held_pause_t;
void begin_pause(held_pause_t *held, fixture_t *fixture, const char *tag);
void join_pause(held_pause_t *held); /* the gate is open: it has succeeded */

/* Fills memory with a pattern that depends on `seed` and position, and checks it. */
void fill(uint64_t address, uint64_t bytes, uint32_t seed);
void assert_filled(uint64_t address, uint64_t bytes, uint32_t seed);
/* The same of a part of what was filled. */
void assert_filled_part(uint64_t address, uint64_t offset, uint64_t bytes, uint32_t seed);
void assert_poisoned(uint64_t address, uint64_t bytes);

/* A host copy that the test keeps alive, as a zero-copy view does; `host` is NULL if there is none. */
typedef struct view {
    tms_host_buffer_t *buffer;
    void *host;
} view_t;
view_t view_of(fixture_t *fixture, uint64_t address, uint64_t bytes);

/* The backup that the stores have, of this pause or of earlier ones; NULL. */
tms_host_buffer_t *host_buffer_of(fixture_t *fixture, const tms_backup_t *backup);
tms_disk_file_t *disk_file_of(fixture_t *fixture, const tms_backup_t *backup);

uint64_t physical_bytes(int device);
tms_segment_state_t state_of(fixture_t *fixture, uint64_t address);
/* Whether the address lies in a managed allocation. */
bool is_managed(fixture_t *fixture, uint64_t address);

#endif
