/* The module's functions. Each fetches its arguments, calls the function table (without the GIL if the call may wait), and
 * returns a result or raises. The declarations and the module's method table are generated from this list. Called with the
 * GIL held, on any thread. */
#ifndef TMS_PYTHON_FUNCTIONS_H
#define TMS_PYTHON_FUNCTIONS_H

#include <Python.h>

/* TAKES(function, signature, docstring): a function with arguments. BARE: one without. */
#define TMS_PY_FUNCTIONS(TAKES, BARE)                                                                                       \
    /* memory_functions.c */                                                                                                \
    TAKES(allocate, "(size, device=-1)", "Address of a managed allocation with the settings of this thread's region.")      \
    TAKES(free, "(address)", "Frees a managed allocation in any state; False if the address is not managed.")               \
    TAKES(set_memory_margin, "(size)", "Bytes of device memory that allocations must leave free.")                          \
    BARE(get_memory_margin, "()", "Bytes of device memory that allocations must leave free.")                               \
    TAKES(set_retain_backup, "(retain)", "Whether host backups are kept after a resume.")                                   \
    BARE(get_retain_backup, "()", "Whether host backups are kept after a resume.")                                          \
    TAKES(set_disk_directory, "(path)", "Where new backup files are made; created if needed.")                              \
    TAKES(reserve_host_memory, "(size, device=-1)", "Prepares host memory for backups, in the background.")                 \
    BARE(release_host_memory, "()", "Releases idle pooled host memory, in the background.")                                 \
    TAKES(set_host_policy, "(policy)", "The default policy for host memory after a resume.")                                \
    BARE(get_host_policy, "()", "The default policy for host memory after a resume.")                                       \
    TAKES(set_guard, "(on)", "Whether later pauses and resumes guard paused memory.")                                       \
    BARE(get_guard, "()", "Whether pauses and resumes guard paused memory.")                                                \
    BARE(get_ledger, "()", "Whether TMS_LEDGER is set.")                                                                    \
    BARE(close, "()", "No thread of the library calls the driver after this.")                                              \
    /* transition_functions.c */                                                                                            \
    TAKES(pause, "(tags, stream, interruptible=False, backup=None, find_live=None, progress=None, preserves=False)",        \
          "Releases physical memory; None is every tag. Returns a Report.")                                                 \
    TAKES(resume,                                                                                                           \
          "(tags, stream, interruptible=False, timeout=0.0, exclusive=False, host_policy=0, zero=False, progress=None)",    \
          "Maps physical memory again; None is every tag. Returns a Report.")                                               \
    TAKES(read_backup, "(address, size, destination, stream, interruptible=False)",                                         \
          "Whether a backup on disk holds the range; copies it to an address in host memory.")                              \
    TAKES(count_guard_bytes, "(tags, stream, ranges, interruptible=False)",                                                 \
          "The number of guard bytes in each range; None if it is not resident.")                                           \
    /* pending_functions.c */                                                                                               \
    TAKES(resume_begin, "(tags, stream, timeout=0.0, exclusive=False, host_policy=0, zero=False)",                          \
          "Begins a resume in the background. Returns a Pending.")                                                          \
    TAKES(pending_done, "(pending)", "Whether it has ended, successfully or not.")                                          \
    TAKES(pending_await, "(pending, seconds, interruptible=False)",                                                         \
          "Waits for its end, successful or not. Returns whether it came within so many seconds.")                          \
    TAKES(pending_wait, "(pending, interruptible=False)", "Waits for its end. Returns a Report.")                           \
    TAKES(pending_wait_stream, "(pending, stream, interruptible=False)",                                                    \
          "Makes a stream wait for its copies, once all are queued.")                                                       \
    /* log_functions.c */                                                                                                   \
    TAKES(collect_log, "(function, lines)",                                                                                 \
          "Calls it. Log lines written meanwhile are appended to `lines` as (level, text) instead of going to stderr.")     \
    TAKES(write_log, "(level, text)", "Writes a line to stderr as the native log does.")                                    \
    /* host_buffer.c */                                                                                                     \
    TAKES(host_backup, "(address, size)", "The host copy of a range as a HostBuffer; None if there is none now.")           \
    /* scope.c */                                                                                                           \
    TAKES(within, "(manager, function, argument=None)", "Calls a function inside a context manager.")                       \
    /* region_functions.c */                                                                                                \
    TAKES(region_enter, "(tag, backup, managed, host_policy=0, runs=True)",                                                 \
          "Enters a level of settings on this thread; returns its id.")                                                     \
    TAKES(region_leave, "(level)",                                                                                          \
          "Leaves that level only; returns the number of later ones that stay, -1 if it is not one of this thread's.")      \
    BARE(region_current, "()", "(tag, backup, managed, depth, runs) of this thread; depth 0 is outside every region.")      \
    TAKES(region_set, "(tag, backup, managed, host_policy=0, runs=True)",                                                   \
          "Changes this thread's innermost level in place.")                                                                \
    TAKES(capture_begin, "(tag, backup, host_policy=0, runs=True)",                                                         \
          "A stream capture is about to begin; None: no settings for other threads.")                                       \
    TAKES(capture_begin_on, "(stream)",                                                                                     \
          "A stream capture is about to begin on this stream, which is queried later for an active capture.")               \
    TAKES(capture_begun, "(identity)", "The capture of capture_begin_on has begun.")                                        \
    TAKES(capture_end, "(identity=0, unless_it_goes_on=False)", "A stream capture has ended; 0: the last one.")             \
    /* query_functions.c */                                                                                                 \
    BARE(refresh_peers, "()", "Grants devices that this process has begun to use access to managed memory.")                \
    TAKES(listen_devices, "(listener, mask)",                                                                               \
          "Has listener(device) called on another thread when torch first allocates on a device of the mask.")              \
    BARE(device_count, "()", "The number of CUDA devices.")                                                                 \
    BARE(active_devices, "()", "Bit d is set where this process uses device d.")                                            \
    TAKES(device_memory, "(device)", "(free, total) bytes of a device.")                                                    \
    TAKES(device_info, "(device)", "What a device is, as a DeviceInfo.")                                                    \
    BARE(libraries, "()", "Memory that is not managed, by library and device.")                                             \
    BARE(segments, "()", "Every managed allocation, in order of allocation.")                                               \
    TAKES(usage, "(tag, device=-1)", "Allocations by tag, then by device; None and -1: all.")                               \
    BARE(reset_peaks, "()", "Every peak becomes what is mapped now.")                                                       \
    TAKES(find, "(address)", "The managed allocation that an address lies in, or None.")                                    \
    TAKES(export_memory, "(address)", "A file descriptor of the physical memory that an address lies in, as an Export.")    \
    TAKES(tag_info, "(tag)", "How far a tag is paused, as a TagInfo.")                                                      \
    BARE(tags, "()", "Whether an allocation ever had it, by tag, for all that regions and allocations have had.")           \
    BARE(in_transition, "()", "Whether this thread is inside a pause or resume, in a signal handler or finaliser.")         \
    BARE(counters, "()", "Every counter by name.")                                                                          \
    /* live_functions.c */                                                                                                  \
    TAKES(kept_allocations, "(tags, every_backup)", "What a pause may keep, as sorted numbers.")                            \
    TAKES(knows_blocks, "(segment, pools, default_stream_only)",                                                            \
          "Whether torch reports correctly which blocks of a segment are live.")                                            \
    TAKES(live_ranges, "(segments, kept, pools, default_stream_only)",                                                      \
          "The allocations whose live bytes are known, and these, for find_live of pause().")                               \
    /* event_functions.c */                                                                                                 \
    BARE(events, "()", "The latest events, and what is held after the last of them, as an EventsCopy.")                     \
    TAKES(set_event_samples, "(on)", "Whether later pauses and resumes record the free memory of their devices.")           \
    /* page_functions.c */                                                                                                  \
    TAKES(set_page_role, "(name, rank, serves)", "What the shared page says of this process; rank -1: unknown.")            \
    BARE(page_requests, "()", "The bits of the requests in the shared page; 0 without a page.")                             \
    TAKES(page_serve, "(kind, served, os_error=0)", "A request has been served, or not.")                                   \
    BARE(page_path, "()", "The path of the shared page of this process, or None.")                                          \
    BARE(page_directory, "()", "The directory of shared pages.")                                                            \
    TAKES(read_page, "(descriptor)", "What the shared page in an open file says.")                                          \
    TAKES(request_page, "(descriptor, kind, withdraw=False)", "Sets a request in the shared page in an open file.")

#define TMS_PY_DECLARE_TAKES(function, signature, text)                                                                     \
    PyObject *tms_py_##function(PyObject *module, PyObject *const *arguments, Py_ssize_t positional, PyObject *keywords);
#define TMS_PY_DECLARE_BARE(function, signature, text) PyObject *tms_py_##function(PyObject *module, PyObject *unused);
TMS_PY_FUNCTIONS(TMS_PY_DECLARE_TAKES, TMS_PY_DECLARE_BARE)
#undef TMS_PY_DECLARE_TAKES
#undef TMS_PY_DECLARE_BARE

/* The type HostBuffer: a new reference, for the module's state. */
PyObject *tms_py_host_buffer_type(PyObject *module);
/* The type Pending, likewise. */
PyObject *tms_py_pending_type(PyObject *module);
/* The type Scope: a new reference. */
PyObject *tms_py_scope_type(PyObject *module);

#endif
