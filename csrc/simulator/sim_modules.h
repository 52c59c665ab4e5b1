/* What the parts of the simulated GPU offer one another, beside the implementations of entry points, which sim_entries.h
 * declares. Every function needs the simulator's lock, unless it says otherwise; those that wait give it up meanwhile. */
#ifndef TMS_SIM_MODULES_H
#define TMS_SIM_MODULES_H

#include "sim_state.h"

/* environment.c: reads TMS_SIMULATED_*; what is malformed is reported on stderr and ignored. */
void sim_environment_read(void);
int sim_environment_devices(void); /* of the machine; needs no lock */

/* entry.c: counts, faults and the trace. */
int sim_entry_fail_after(const char *name, uint64_t succeed, uint64_t fail, int code);
uint64_t sim_entry_count(const char *name);
void sim_entry_clear(void); /* counts and trace */
size_t sim_entry_read_trace(char *text, size_t capacity);

/* budget.c: bytes of a device, charged to this process; shared with other processes where TMS_SIMULATED_SHARED says so. */
void sim_budget_attach(void);
void sim_budget_detach(void);
bool sim_budget_charge(int device, uint64_t bytes, bool taken);
bool sim_budget_credit(int device, uint64_t bytes, bool taken); /* false: not that much was charged */
uint64_t sim_budget_available(int device);
uint64_t sim_budget_total(void);

/* visible.c: what CUDA_VISIBLE_DEVICES leaves of the machine's devices. An ordinal is the program's number of a device, a
 * place the machine's. */
enum { SIM_FIRST_BUS = 0x10, SIM_UUID_TEXT_BYTES = 41 }; /* PCI; GPU-01234567-89ab-cdef-0123-456789abcdef */
void sim_visible_all(void);                              /* of them */
void sim_visible_read(void);                             /* from the environment */
int sim_visible_place(int ordinal);
int sim_visible_ordinal(int place); /* -1: the program does not see it */
void sim_visible_uuid(int place, unsigned char *uuid);
void sim_visible_uuid_text(int place, char *text);

/* device.c */
bool sim_device_valid(int device);

/* context.c. The current context of the thread, or NULL where there is none or it was destroyed. */
sim_context_t *sim_context_current(void);
/* The same, with the errors of a call that needs it. */
CUresult sim_context_require(sim_context_t **context);
/* Makes a device's primary context, if need be, and references it once for the runtime. */
CUresult sim_context_retain_for_runtime(int device);
/* Makes a device's primary context current, be it of use or not. */
CUresult sim_context_select(int device);
/* The same for the runtime's current device, and it is current from now on, where no context was. */
CUresult sim_context_attach_runtime(void);
void sim_context_fail(sim_context_t *context, CUresult error); /* the first error stays */
void sim_context_destroy(sim_context_t *context);
void sim_context_clear(void); /* forgets all handles, and frees what cuCtxCreate made */
/* Waits for all work submitted to it so far. */
CUresult sim_context_drain(sim_context_t *context);

/* pieces.c. A piece of the device's memfd, poisoned; false without memory. */
bool sim_piece_take(sim_device_t *device, uint64_t bytes, off_t *offset);
/* Gives it back, for the next that takes one of this size if `keep` allows it, else to the system. */
void sim_piece_put(sim_device_t *device, off_t offset, uint64_t bytes, bool keep);
/* Everything, with the memfd itself. */
void sim_piece_clear(sim_device_t *device);

/* memory.c */
sim_mapping_t *sim_memory_mapping_at(uint64_t address); /* that covers this address, or NULL */
sim_reservation_t *sim_memory_reservation_at(uint64_t address);
/* Whether all of a range may be read (or written) by all devices of the mask. `kernel` is the context of a kernel, which
 * needs peer access enabled for other devices' cudaMalloc memory, or NULL for a copy, which does not. */
bool sim_memory_reachable(uint64_t address, uint64_t bytes, unsigned devices, bool writes, const sim_context_t *kernel);
/* Pins the mapping at an address, so that nobody unmaps it, and tells how many of `bytes` from there it covers. NULL where
 * the range may not be touched. Never waits: sim_state.unmapping must be false. */
sim_mapping_t *sim_memory_pin(uint64_t address, uint64_t *bytes, unsigned devices, bool writes, const sim_context_t *kernel);
void sim_memory_unpin(sim_mapping_t *mapping);
/* The pieces that cudaMalloc's memory is put together from. */
CUresult sim_memory_reserve_range(uint64_t bytes, uint64_t alignment, uint64_t hint, bool runtime, uint64_t *address);
void sim_memory_free_range(sim_reservation_t *reservation);
CUresult sim_memory_create_physical(int device, uint64_t bytes, bool runtime, sim_physical_t **physical);
void sim_memory_drop_physical(sim_physical_t *physical); /* frees it once it is neither referenced nor mapped */
CUresult sim_memory_map_physical(uint64_t address, uint64_t bytes, sim_physical_t *physical, sim_mapping_t **mapping);
CUresult sim_memory_protect(sim_mapping_t *mapping, int device, CUmemAccess_flags flags);
/* Waits until nobody touches the mappings that start in a range and takes them away. */
CUresult sim_memory_unmap_range(uint64_t address, uint64_t bytes, bool runtime);
/* Everything, whatever it is; for a reset. */
void sim_memory_clear(void);

/* The allocation that a handle of the program names, or NULL. */
sim_physical_t *sim_memory_find_physical(CUmemGenericAllocationHandle handle);
/* Waits until nobody touches the mappings of a handle's memory. */
CUresult sim_memory_await_pins(CUmemGenericAllocationHandle handle);
/* Shows the file, from its start, wherever the memory is mapped, without waiting. */
CUresult sim_memory_remap(const sim_physical_t *physical, int file);

/* export.c: whether another process, or a descriptor in this one, has the memory. */
bool sim_export_held(const sim_physical_t *physical);
/* Frees released memory that nobody has any more. */
void sim_export_sweep(void);

/* device_memory.c: gives back all that was allocated in a context. */
void sim_device_memory_clear(const sim_context_t *context);

/* reservation.c: whether no address of a range is one of the device's. */
bool sim_memory_unreserved(uint64_t address, uint64_t bytes);

/* host_memory.c: the pinned block around an address, or NULL. */
sim_host_t *sim_host_at(uint64_t address);
void sim_host_clear_context(const sim_context_t *context); /* what was allocated or registered in it */
void sim_host_clear(void);

/* stream.c. NULL for a handle that names none; CU_STREAM_LEGACY and NULL are the current context's legacy stream. */
sim_stream_t *sim_stream_find(CUstream handle);
/* Puts a copy of the work at the end of the stream's queue, or into the graph that it captures, and tells where it stands:
 * `position` (may be NULL) is 0 in a capture. */
CUresult sim_stream_submit(sim_stream_t *stream, const sim_op_t *op, uint64_t *position);
bool sim_stream_reached(uint64_t stream, uint64_t position);
CUresult sim_stream_wait(sim_stream_t *stream, uint64_t position);
/* Waits until no queued work uses the host memory. */
CUresult sim_stream_wait_for_host(uint64_t address, uint64_t bytes);
bool sim_stream_busy(const sim_context_t *context, uint64_t before_ticket); /* work submitted earlier is not complete */
void sim_stream_close_all(sim_context_t *context);                          /* of a context that is being destroyed */
void sim_stream_clear(void);                                                /* every thread ends and is joined */

/* work.c. Work in a queue or in a graph holds references to the objects that it names. */
void sim_op_retain(const sim_op_t *op);
void sim_op_release(const sim_op_t *op);
/* How many bytes lie between the first and the end of the last that work of rows touches. */
uint64_t sim_op_extent(const sim_op_t *op, uint64_t pitch);
/* Does a piece of work; the lock is free while bytes are touched. */
CUresult sim_stream_work(sim_stream_t *stream, sim_op_t *op);
/* Has the pages of memory found all at once, for bytes that are about to be touched: a fault a page takes much longer. Needs
 * no lock; a kernel without that does without it. */
void sim_work_populate(uint64_t address, uint64_t bytes, bool writes);
/* Whether the stream's work is still to be done. */
bool sim_stream_goes_on(const sim_stream_t *stream);
/* Whether a copy or fill finds its memory mapped and accessible now; without a context, whether it finds it mapped. */
bool sim_work_reachable(const sim_context_t *context, const sim_op_t *op);

/* kernel_work.c: interprets a kernel; the lock is free while bytes are touched. Work that is queued or part of a graph holds
 * a reference to its kernel. */
CUresult sim_kernel_work(sim_stream_t *stream, const sim_kernel_t *kernel);
sim_kernel_t *sim_kernel_retain(sim_kernel_t *kernel); /* NULL stays NULL */
void sim_kernel_release(sim_kernel_t *kernel);

/* event.c. The `number`th record of an event is reached now. */
void sim_event_reach(sim_event_t *event, uint64_t number);
/* Notes that a record of an event stands at this place of a stream, and numbers it. */
uint64_t sim_event_note(sim_event_t *event, const sim_stream_t *stream, uint64_t position);
void sim_event_release(sim_event_t *event); /* one reference */
sim_event_t *sim_event_new(unsigned flags); /* with one reference, the program's; NULL without memory */
void sim_event_clear(void);

/* event_shared.c: what processes that share an event see of it. */
bool sim_event_share(sim_event_t *event); /* from now on; false without memory */
void sim_event_unshare(sim_event_t *event);
uint64_t sim_event_shared_record(sim_event_t *event); /* its number */
void sim_event_shared_reach(sim_event_t *event, uint64_t number);
/* Whether the last record was another process's; its number then. */
bool sim_event_is_remote(const sim_event_t *event, uint64_t *number);
/* Whether that record was reached, or who recorded it is dead. */
bool sim_event_remote_reached(const sim_event_t *event, uint64_t number);

/* ipc.c: closes an import of this process, whatever was opened how often. */
CUresult sim_ipc_forget(sim_mapping_t *mapping);

/* copy.c: copies and fills of rows, checked and issued; `now`: through the legacy stream, and waited for. */
CUresult sim_copy_issue(const sim_op_t *op, CUstream stream, bool now);

/* capture.c: whether the call is forbidden by a capture under way; then that capture is invalidated. */
CUresult sim_capture_check_unsafe(void);
CUresult sim_capture_check_context(const sim_context_t *context);
CUresult sim_capture_check_legacy(const sim_context_t *context, bool query);
CUresult sim_capture_check_stream(sim_stream_t *stream); /* synchronising or querying it */
CUresult sim_capture_record(sim_stream_t *stream, const sim_op_t *op);
void sim_capture_join(sim_capture_t *capture, sim_stream_t *stream);
CUstreamCaptureStatus sim_capture_state(const sim_stream_t *stream);
void sim_capture_forget(sim_stream_t *stream); /* the stream is destroyed */
void sim_capture_clear(void);

/* runtime.c: whether the program was built for CUDA 12. Some functions take other arguments there, under the same name. */
bool sim_runtime_is_12(void);

/* graph.c */
sim_graph_t *sim_graph_new(bool executable);
/* Adds work at the end, that depends on these nodes, and says which node it is. Whatever a stream was given while it
 * captures comes here by way of sim_stream_submit: that is all that an entry point needs to do to be capturable. */
sim_node_t *sim_graph_append(sim_graph_t *graph, const sim_op_t *op, const sim_nodes_t *dependencies);
/* Sets of nodes. False without memory; then nothing has changed. */
bool sim_nodes_add(sim_nodes_t *nodes, const uint64_t *ids, size_t count);
void sim_nodes_clear(sim_nodes_t *nodes);
void sim_graph_delete(sim_graph_t *graph);
void sim_graph_clear(void);

/* report.c: what leaked, to stderr. */
void sim_report(void);

#endif
