/* The state of the simulated GPU and its objects.
 *
 * sim_state.lock guards everything here; exceptions are marked. Every entry point takes the lock (sim_life_enter) and
 * holds it while it runs; a wait releases it (sim_state_wait). Worker threads (streams/stream.c) hold it except while
 * they touch bytes. Contexts, streams, events, graphs and physical memory have identifiers that are never reused, so a
 * stale handle is always detected. */
#ifndef TMS_SIM_BASE_SIMULATION_H
#define TMS_SIM_BASE_SIMULATION_H

#include <cuda.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#include "simulator/base/runtime_types.h"
#include "simulator/base/table.h"
#include "simulator/simulator.h"

enum {
    SIM_CONTEXT_DEPTH = 32,    /* maximum number of contexts on a thread's stack */
    SIM_CHUNK_BYTES = 1 << 20, /* bytes that a worker touches between two lookups of the mappings */
    SIM_FIRST_ID = 1 << 20,    /* identifiers are never small numbers, nor the special stream handles */
    SIM_KEPT_PIECES = 64,      /* maximum number per device */
    SIM_NAME_BYTES = 96,
    SIM_CALL_LIMIT = 512,       /* upper bound on the number of entry points */
    SIM_EDGE_DATA_BYTES = 8,    /* bytes of a graph edge's data */
    SIM_GREATEST_PRIORITY = -5, /* the highest priority of a stream; the lowest is 0 */
    SIM_ACCESS_BYTES = 384,     /* size of the description of an access */
    SIM_TEXT_BYTES = 512,       /* size of an error's text, which contains that description */
};

typedef struct sim_context sim_context_t;
typedef struct sim_graph sim_graph_t;
typedef struct sim_stream sim_stream_t;
typedef struct sim_task sim_task_t; /* work/op.h */
typedef struct sim_event sim_event_t;
typedef struct sim_shared_event sim_shared_event_t; /* work/event.c */

/* A free piece of a device's memfd: memory/physical.c. */
typedef struct sim_piece {
    off_t offset;
    uint64_t bytes;
    uint64_t backed_bytes; /* bytes that are backed by pages */
} sim_piece_t;

/* Physical memory: a piece of the device's memfd, or a file of its own. */
typedef struct sim_physical {
    uint64_t id;
    int device;
    uint64_t bytes;
    off_t offset;
    unsigned references;   /* from cuMemCreate and cuMemRetainAllocationHandle, minus the releases */
    unsigned mapped;       /* number of mappings */
    bool runtime;          /* from cudaMalloc: the program has no handle */
    bool module;           /* globals of a module: not charged, like the memory of contexts */
    bool shared_in_place;  /* other processes may have opened it in place: its piece is never reused */
    bool imported;         /* owned and charged by another process; `references` counts the opens */
    bool held;             /* released and not mapped here, but another holder has an export of it */
    unsigned handle_types; /* handle types that the program requested */
    bool rdma;             /* the program requested memory that network cards can register */
    int file;              /* the file if imported or exported; -1: in the device's memfd */
    uint64_t file_id;      /* inode of `file` */
    bool sent;             /* the device process may have this file open */
} sim_physical_t;

typedef struct sim_reservation {
    uint64_t address;
    uint64_t bytes;
    bool runtime;
    bool sent; /* the device process may have mapped this range */
} sim_reservation_t;

/* Memory that the program has released. One of the members is set; the other is 0. */
typedef struct sim_stale {
    uint64_t range; /* address of a released reservation */
    uint64_t file;  /* inode of a released file */
} sim_stale_t;

typedef struct sim_mapping {
    uint64_t id;
    uint64_t address;
    uint64_t bytes; /* accessible bytes: for cudaMalloc the requested size */
    uint64_t span;  /* size of the address range: whole granules */
    sim_physical_t *physical;
    CUmemAccess_flags access[TMS_SIM_MAX_DEVICES];
    unsigned pins; /* chunks that workers are touching now */
    bool runtime;
    sim_context_t *context; /* the owner of cudaMalloc memory that is not imported; freed with it */
} sim_mapping_t;

/* Kinds of CUmemLocation that cuda.h defines since CUDA 12.2. */
enum { SIM_LOCATION_HOST = 2, SIM_LOCATION_HOST_NUMA = 3, SIM_LOCATION_HOST_NUMA_CURRENT = 4 };

struct sim_context {
    uint64_t id;
    int device;
    bool alive;
    uint64_t activation; /* changes with each activation; a primary context keeps its handle */
    bool created;        /* created by cuCtxCreate; stays in the table until a reset */
    unsigned references; /* number of references to a primary context */
    unsigned flags;
    CUresult error;                  /* sticky */
    bool runtime;                    /* the runtime holds one reference */
    bool peers[TMS_SIM_MAX_DEVICES]; /* devices whose cudaMalloc memory kernels of this context may access */
    sim_stream_t *legacy;            /* created at first use */
};

typedef struct sim_device {
    sim_context_t primary;
    int memory; /* the memfd, which is -1 until the first allocation */
    off_t end;  /* end of the memfd */
    sim_piece_t kept[SIM_KEPT_PIECES];
    unsigned kept_count;
    uint64_t kept_backed_bytes; /* bytes of the free pieces that are backed by pages */
    CUresult lost;              /* the context's fatal error: this process can no longer use the device */
    uint64_t used;              /* bytes charged by this process */
    uint64_t taken;             /* bytes charged by tms_sim_take_memory */
    unsigned contexts;          /* contexts that are alive */
    uint64_t handles, mappings, runtime_allocations, streams;
} sim_device_t;

typedef enum sim_op_kind {
    SIM_OP_ADD,    /* tms_sim_launch_add */
    SIM_OP_SET,    /* a fill */
    SIM_OP_COPY,   /* fills and copies may have several rows */
    SIM_OP_WAIT,   /* waits for a position in another stream; without a stream: no operation */
    SIM_OP_REMOTE, /* waits for record number `position` of an event that another process shares */
    SIM_OP_RECORD, /* record number `position` of an event */
    SIM_OP_HOST,   /* a host function of the program */
    SIM_OP_SLEEP,  /* occupies the stream for some time */
    SIM_OP_TASK,
} sim_op_kind_t;

/* One work item of a stream or a graph. */
typedef struct sim_op {
    struct sim_op *next;
    sim_op_kind_t kind;
    uint64_t ticket; /* submission order in this process */
    uint64_t destination, source;
    bool destination_on_device, source_on_device;
    bool between_devices; /* each side is accessed by its own device: cudaMemcpyPeer */
    int destination_device, source_device;
    const sim_context_t *context; /* of a node: the context in which it was captured */
    bool of_graph;                /* launched as a graph node */
    uint64_t bytes;               /* per row */
    uint64_t rows;                /* 0 means 1 */
    uint64_t destination_pitch, source_pitch;
    uint64_t nanoseconds; /* SIM_OP_SLEEP */
    uint32_t value;
    unsigned width; /* of `value`, in bytes: 1 or 4; 0 means 1 */
    int gate;
    uint64_t stream, position; /* SIM_OP_WAIT: the position to wait for */
    sim_event_t *event;        /* holds one reference */
    sim_task_t *task;          /* SIM_OP_TASK: holds one reference */
    sim_host_function_t *function;
    sim_stream_callback_t *callback; /* SIM_OP_HOST: either `function` or `callback` */
    void *argument;
} sim_op_t;

typedef struct sim_capture {
    struct sim_capture *next;
    uint64_t id; /* the id in cudaStreamGetCaptureInfo */
    CUstreamCaptureMode mode;
    uint64_t thread;
    uint64_t origin; /* the stream that began it */
    sim_graph_t *graph;
    bool owns_graph; /* false: the program supplied the graph */
    bool invalidated;
} sim_capture_t;

struct sim_stream {
    uint64_t id;
    sim_context_t *context;
    bool legacy;
    bool blocking;   /* synchronises implicitly with the legacy stream */
    bool closing;    /* destroyed by the program: completes its queue, then ends */
    bool cancelling; /* its context is being destroyed: queued work is cancelled */
    int priority;
    bool per_thread; /* a thread's default stream; the program did not create it */
    uint64_t owner;  /* that thread */
    bool has_worker; /* has a worker thread */
    pthread_t thread;
    pthread_cond_t wakeup;  /* signals an idle worker: new work, or the stream closes */
    sim_op_t *first, *last; /* the running work item stays first */
    uint64_t submitted, completed;
    sim_capture_t *capture;
    uint64_t captured; /* number of work items captured from this stream */
    sim_ids_t tails;   /* dependencies of the next captured node */
    bool joined;       /* in a capture: another stream depends on all work of this one */
    sim_stream_t *next_finished;
};

struct sim_event {
    uint64_t id;
    unsigned references; /* held by the program, queued work and graphs */
    unsigned flags;
    uint64_t stream, position;   /* position of the last record; stream 0: never recorded */
    int device;                  /* device of the last record */
    uint64_t records, completed; /* number of records, and the last completed one */
    struct timespec time;        /* when the last completed record was reached */
    bool captured;               /* last recorded in a capture: has no time */
    sim_capture_t *capture;      /* that capture, while it is active */
    sim_ids_t nodes;             /* dependencies of a captured wait for this event */
    sim_shared_event_t *shared;  /* the part that other processes share; NULL: not shared */
    int shared_file;
    bool imported; /* created by another process */
};

/* A graph node: a work item that can be replayed. Every kind of stream work can be a node. */
typedef struct sim_node {
    struct sim_node *next;
    uint64_t id;
    sim_op_t op;
    sim_ids_t dependencies; /* empty in an executable graph, which runs in list order */
} sim_node_t;

struct sim_graph {
    uint64_t id;
    bool executable;
    sim_node_t *first, *last;
    size_t count;
    uint64_t stream, position; /* for an executable graph: the end of its last launch */
};

typedef struct sim_host {
    uint64_t address;
    uint64_t bytes;
    sim_context_t *context; /* the context that owns it */
    unsigned flags;         /* flags of the allocation or the registration */
    bool registered;
} sim_host_t;

/* A rule of tms_sim_fail_after. */
typedef struct sim_fault {
    uint64_t succeed, fail;
    int code;
} sim_fault_t;

typedef struct sim_shared sim_shared_t; /* devices/budget.c */

typedef struct sim_state {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* any change: work submitted, done, cancelled; a gate opened; shutdown */
    _Atomic(int) pid;       /* the process that initialised the state, or 0; read without the lock */

    uint64_t epoch; /* counts resets; invalidates per-thread state */
    bool initialized;
    bool deinitialized;
    bool stopping; /* workers cancel their work and exit */
    uint64_t next_id, next_ticket, next_capture;
    _Atomic(uint64_t) next_thread; /* accessed without the lock */

    int machine_count;                /* devices of the machine */
    int device_count;                 /* devices visible to the program */
    int visible[TMS_SIM_MAX_DEVICES]; /* machine index of each visible device */
    uint64_t device_bytes;
    uint64_t bandwidth;
    uint64_t poison_limit;
    bool peer_capable;
    bool report;
    sim_device_t devices[TMS_SIM_MAX_DEVICES];

    sim_table_t reservations, mappings, physicals, hosts;
    sim_table_t contexts, streams, events, graphs, nodes, gates;
    sim_table_t communicators; /* nccl/communicator.h */
    uint64_t nccl_bytes;       /* device memory that each communicator holds */
    sim_capture_t *captures;
    sim_stream_t *finished; /* streams whose worker can be joined */
    unsigned synchronizing; /* number of threads waiting for device work */
    bool unmapping;         /* a thread waits for pins to be released: no new pins */
    uint64_t reserved;      /* number of the program's reservations */
    uint64_t host_bytes;
    unsigned held;      /* number of sim_physical_t with `held` set */
    sim_stale_t *stale; /* memory/physical.h */
    size_t stale_count, stale_capacity;

    uint64_t counts[SIM_CALL_LIMIT]; /* per entry point: control/calls.c */
    sim_fault_t faults[SIM_CALL_LIMIT];
    sim_fault_t fault_any;
    uint64_t failures;
    bool tracing;
    uint16_t *trace;
    size_t trace_count, trace_capacity;
    int trace_file;

    sim_table_t modules;         /* runtime/modules.c */
    sim_table_t kernels_refused; /* kernels already reported on stderr, by address of the name */

    _Atomic(const tms_api_t *) manager;  /* tms_sim_set_manager; needs no lock, and outlives a reset */
    char illegal_access[SIM_TEXT_BYTES]; /* the access that caused the first CUDA_ERROR_ILLEGAL_ADDRESS; "" before it */
    _Atomic bool illegal_access_read;    /* the program has read it; accessed without the lock */

    unsigned unsupported;            /* bit mask of functions already reported on stderr: control/unsupported.c */
    _Atomic uint64_t calls_in_child; /* made in a forked child, which takes no lock; they fail */

    sim_shared_t *shared;
    int shared_file;
    char shared_name[SIM_NAME_BYTES];
    unsigned shared_seat; /* index of this process's entry */
} sim_state_t;

extern sim_state_t sim_state;

/* Per-thread state. Valid while `epoch` equals sim_state.epoch. */
typedef struct sim_thread {
    uint64_t epoch;
    uint64_t id;
    uint64_t contexts[SIM_CONTEXT_DEPTH];
    unsigned depth;
    int device; /* the runtime's current device, used while no context is current */
    int last_error;
    CUstreamCaptureMode mode;
    bool in_callback;                      /* this worker is in a callback of the program */
    uint64_t streams[TMS_SIM_MAX_DEVICES]; /* its default stream per device, in the primary context */
    uint64_t unreachable;                  /* the address of the last access that was refused, or 0 */
    char refused_access[SIM_TEXT_BYTES];   /* that access, if the thread's last call failed because of it; else "" */
    bool draws, drawn;                     /* tms_sim_begin_draw; a kernel has been launched since */
    tms_sim_draw_t draw;
} sim_thread_t;

/* Whether this is a forked child of a process that had initialised the state. The child must not take the lock, because a
 * thread of the parent may have held it. Needs no lock. */
bool sim_state_forked(void);
/* The state of the calling thread. Needs no lock. */
sim_thread_t *sim_state_thread(void);

/* Waits for any change; releases the lock during the wait. False at shutdown: the caller then returns
 * CUDA_ERROR_DEINITIALIZED. */
bool sim_state_wait(void);
/* Waits for any change with a short timeout, because changes by other processes send no signal. */
bool sim_state_wait_briefly(void);
void sim_state_changed(void);
/* Bracket a wait for device work; tms_sim_wait_until_synchronizing observes it. */
void sim_state_begin_synchronizing(void);
void sim_state_end_synchronizing(void);
uint64_t sim_state_new_id(void);
/* Whether a stream may continue to work: not at shutdown, not during cancellation, not after an error. */
bool sim_state_may_continue(const sim_stream_t *stream);

#endif
