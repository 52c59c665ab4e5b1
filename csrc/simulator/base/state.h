/* The one state of the simulated GPU, and the objects it holds.
 *
 * Everything here is guarded by sim_state.lock, which every entry point takes (sim_life_enter) and holds while it runs;
 * waiting gives it up (sim_state_wait). Worker threads (streams/stream.c) take it for everything but touching bytes. The
 * exceptions are marked. Objects that the program names by handles (contexts, streams, events, graphs, physical memory) have
 * identifiers that are never used twice, so a stale handle is always found out. */
#ifndef TMS_SIM_BASE_STATE_H
#define TMS_SIM_BASE_STATE_H

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
    SIM_CONTEXT_DEPTH = 32,    /* of a thread's stack of contexts */
    SIM_CHUNK_BYTES = 1 << 20, /* touched at a time by a worker, between two looks at the mappings */
    SIM_FIRST_ID = 1 << 20,    /* identifiers are never small numbers, nor the special stream handles */
    SIM_KEPT_PIECES = 64,      /* of a device */
    SIM_NAME_BYTES = 96,
    SIM_CALL_LIMIT = 512,       /* on the entry points that there are */
    SIM_EDGE_DATA_BYTES = 8,    /* of an edge of a graph */
    SIM_GREATEST_PRIORITY = -5, /* of a stream; the least is 0 */
};

typedef struct sim_context sim_context_t;
typedef struct sim_graph sim_graph_t;
typedef struct sim_stream sim_stream_t;
typedef struct sim_kernel sim_kernel_t; /* kernels/kernel.h */
typedef struct sim_task sim_task_t;     /* work/task.h */
typedef struct sim_event sim_event_t;
typedef struct sim_shared_event sim_shared_event_t; /* work/event_shared.c */

/* A piece of a device's memfd that is not in use: memory/pieces.c. */
typedef struct sim_piece {
    off_t offset;
    uint64_t bytes;
    uint64_t pages; /* bytes of it that the host's memory holds */
} sim_piece_t;

/* Physical memory: a piece of the device's memfd, or a file of its own. */
typedef struct sim_physical {
    uint64_t id;
    int device;
    uint64_t bytes;
    off_t offset;
    unsigned references;   /* cuMemCreate's and cuMemRetainAllocationHandle's, less the releases */
    unsigned mapped;       /* mappings of it */
    bool runtime;          /* of cudaMalloc: not a handle that the program knows */
    bool shown;            /* other processes may have opened it where it is: its piece is never used again */
    bool imported;         /* another process's, which is charged for it; `references` counts how often it was opened */
    bool held;             /* released and not mapped here, but exported, and another holder still has it */
    unsigned handle_types; /* as which it may be exported */
    int file;              /* where it is, if it is imported or exported, else -1: in the device's memfd */
    uint64_t file_id;      /* the inode of that */
    bool placed;           /* the device process may have that file */
} sim_physical_t;

typedef struct sim_reservation {
    uint64_t address;
    uint64_t bytes;
    bool runtime;
    bool placed; /* the device process may have mapped what is in it */
} sim_reservation_t;

typedef struct sim_mapping {
    uint64_t address;
    uint64_t bytes; /* that may be touched: for cudaMalloc what the program asked for */
    uint64_t span;  /* of addresses that it covers: whole granules */
    sim_physical_t *physical;
    CUmemAccess_flags access[TMS_SIM_MAX_DEVICES];
    unsigned pins; /* chunks of it that workers are touching just now */
    bool runtime;
    sim_context_t *context; /* of cudaMalloc's memory that is not imported: in which it was made, and with which it goes */
} sim_mapping_t;

/* Kinds of CUmemLocation that cuda.h names since CUDA 12.2. */
enum { SIM_LOCATION_HOST = 2, SIM_LOCATION_HOST_NUMA = 3, SIM_LOCATION_HOST_NUMA_CURRENT = 4 };

struct sim_context {
    uint64_t id;
    int device;
    bool alive;
    uint64_t life;       /* of this one life; the handle of a primary context is the same in each */
    bool created;        /* by cuCtxCreate: not a primary one; stays in the table until a reset */
    unsigned references; /* of a primary context */
    unsigned flags;
    CUresult error;                  /* sticky */
    bool runtime;                    /* the runtime holds one reference */
    bool peers[TMS_SIM_MAX_DEVICES]; /* whose cudaMalloc memory kernels of this context may touch */
    sim_stream_t *legacy;            /* made at its first use */
};

typedef struct sim_device {
    sim_context_t primary;
    int memory; /* the memfd, -1 until the first allocation */
    off_t end;  /* of what was ever allocated in it */
    sim_piece_t kept[SIM_KEPT_PIECES];
    unsigned kept_count;
    uint64_t kept_pages; /* bytes of the host's memory that they hold */
    CUresult lost;       /* the error of its context: for this process it is of no use any more */
    uint64_t used;       /* bytes charged by this process */
    uint64_t taken;      /* bytes of no allocation: tms_sim_take_memory */
    uint64_t handles, mappings, runtime_allocations, streams;
} sim_device_t;

typedef enum sim_op_kind {
    SIM_OP_ADD,    /* tms_sim_launch_add */
    SIM_OP_SET,    /* a fill */
    SIM_OP_COPY,   /* either may be of several rows */
    SIM_OP_WAIT,   /* for a place in another stream; of no stream: nothing at all */
    SIM_OP_REMOTE, /* for the `position`th record of an event that another process shares */
    SIM_OP_RECORD, /* the `position`th of an event */
    SIM_OP_HOST,   /* a function of the program */
    SIM_OP_KERNEL,
    SIM_OP_TASK,
} sim_op_kind_t;

/* Nodes of a graph, by their identifiers. */
typedef struct sim_nodes {
    uint64_t *ids;
    size_t count;
} sim_nodes_t;

/* One piece of work of a stream, or of a graph. */
typedef struct sim_op {
    struct sim_op *next;
    sim_op_kind_t kind;
    uint64_t ticket; /* the order in which work was submitted in this process */
    uint64_t destination, source;
    bool destination_on_device, source_on_device;
    bool by_named; /* each end is touched by the device named for it: cudaMemcpyPeer */
    int destination_device, source_device;
    const sim_context_t *context; /* of a node: in which it was captured */
    bool of_graph;                /* launched as a node of a graph */
    uint64_t bytes;               /* of each row */
    uint64_t rows;                /* 0 and 1 are the same */
    uint64_t destination_pitch, source_pitch;
    uint32_t value;
    unsigned width; /* of the value, in bytes: 0, 1 or 4; 0 is 1 */
    int gate;
    uint64_t stream, position; /* SIM_OP_WAIT: for this much of that stream */
    sim_event_t *event;        /* one reference of it */
    sim_kernel_t *kernel;      /* SIM_OP_KERNEL: one reference of it */
    sim_task_t *task;          /* SIM_OP_TASK: one reference of it */
    sim_host_function_t *function;
    sim_stream_callback_t *callback; /* SIM_OP_HOST has one of the two */
    void *argument;
} sim_op_t;

typedef struct sim_capture {
    struct sim_capture *next;
    uint64_t id; /* what cudaStreamGetCaptureInfo calls it */
    CUstreamCaptureMode mode;
    uint64_t thread;
    uint64_t origin; /* stream */
    sim_graph_t *graph;
    bool owns_graph; /* false: it captures into a graph of the program */
    bool invalidated;
} sim_capture_t;

struct sim_stream {
    uint64_t id;
    sim_context_t *context;
    bool legacy;
    bool blocking; /* takes part in the legacy stream's implicit order */
    bool closing;  /* destroyed by the program: finishes its work and goes */
    bool dropping; /* its context is being destroyed: what is queued is not done */
    int priority;
    bool per_thread; /* a thread's default stream: not one that the program made */
    uint64_t owner;  /* of such a stream: that thread */
    bool served;     /* it has its thread */
    pthread_t thread;
    pthread_cond_t wanted;  /* to a thread without work: there is some, or the stream closes */
    sim_op_t *first, *last; /* the first stays here while it runs */
    uint64_t submitted, completed;
    sim_capture_t *capture;
    uint64_t captured; /* work of this stream in its capture */
    sim_nodes_t tails; /* what its next work in the capture depends on */
    bool joined;       /* in a capture: another stream waits for all that this one did */
    sim_stream_t *next_finished;
};

struct sim_event {
    uint64_t id;
    unsigned references; /* the program's and those of queued work and graphs */
    unsigned flags;
    uint64_t stream, position;   /* where it was recorded; 0: never */
    uint64_t records, completed; /* how often it was recorded, and the last of them that was reached */
    struct timespec time;        /* of that */
    bool captured;               /* recorded in a capture: not a moment in time */
    sim_capture_t *capture;      /* that capture, while it is under way */
    sim_nodes_t nodes;           /* what waits for it there depends on these */
    sim_shared_event_t *shared;  /* of an event that other processes may open: what they see of it */
    int shared_file;
    bool imported; /* another process's */
};

/* A node of a graph: a piece of work that can be replayed. Whatever a stream can do, a node can. */
typedef struct sim_node {
    struct sim_node *next;
    uint64_t id;
    sim_op_t op;
    sim_nodes_t dependencies; /* of an executable graph none: it runs in the order of its list */
} sim_node_t;

struct sim_graph {
    uint64_t id;
    bool executable;
    sim_node_t *first, *last;
    size_t count;
    uint64_t stream, position; /* of an executable graph: where its last launch ends */
};

typedef struct sim_host {
    uint64_t address;
    uint64_t bytes;
    sim_context_t *context; /* in which it was made, and with which it goes */
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
    pthread_cond_t changed; /* anything: work submitted, done, dropped; a gate opened; stopping */
    _Atomic(int) pid;       /* of the process that set this up, 0 before; read without the lock */

    uint64_t epoch; /* counts resets, so that threads forget what they knew */
    bool initialized;
    bool deinitialized;
    bool stopping; /* workers drop their work and end */
    uint64_t next_id, next_ticket, next_capture;
    _Atomic(uint64_t) next_thread; /* without the lock */

    int machine_count;                /* devices of the machine */
    int device_count;                 /* those that the program sees */
    int visible[TMS_SIM_MAX_DEVICES]; /* which of the machine's each of them is */
    uint64_t device_bytes;
    uint64_t bandwidth;
    uint64_t poison_limit;
    bool peer_capable;
    bool report;
    sim_device_t devices[TMS_SIM_MAX_DEVICES];

    sim_table_t reservations, mappings, physicals, hosts;
    sim_table_t contexts, streams, events, graphs, nodes, gates;
    sim_table_t communicators; /* nccl/communicator.h */
    uint64_t nccl_bytes;       /* of a device, that each of them holds */
    sim_capture_t *captures;
    sim_stream_t *finished; /* streams whose thread waits to be joined */
    unsigned synchronizing; /* threads that wait for work */
    bool unmapping;         /* a thread waits for pins to go: no new ones */
    uint64_t reserved;      /* reservations of the program */
    uint64_t host_bytes;
    unsigned held; /* physical memory that is */

    uint64_t counts[SIM_CALL_LIMIT]; /* of each entry point: control/calls.c */
    sim_fault_t faults[SIM_CALL_LIMIT];
    sim_fault_t fault_any;
    uint64_t failures;
    bool tracing;
    uint16_t *trace;
    size_t trace_count, trace_capacity;
    int trace_file;

    bool kernels_skipped_silently; /* TMS_SIMULATED_KERNELS=skip */
    uint64_t kernels_launched, kernels_skipped;
    sim_table_t kernels_named; /* what stderr has named, by the address of the name */

    unsigned refused; /* functions that stderr has named: control/unsupported.c */

    sim_shared_t *shared;
    int shared_file;
    char shared_name[SIM_NAME_BYTES];
    unsigned shared_seat; /* this process's entry */
} sim_state_t;

extern sim_state_t sim_state;

/* What a thread knows; `epoch` tells whether it still holds. */
typedef struct sim_thread {
    uint64_t epoch;
    uint64_t id;
    uint64_t contexts[SIM_CONTEXT_DEPTH];
    unsigned depth;
    int device; /* the runtime's current device, while there is no context */
    int last_error;
    CUstreamCaptureMode mode;
    bool calls_back;                       /* it is a worker that calls a function of the program */
    uint64_t streams[TMS_SIM_MAX_DEVICES]; /* its default stream in each device's primary context */
} sim_thread_t;

/* Whether this is a forked child of a process that had set everything up: then the lock, perhaps held by a thread that does
 * not exist here, must be left alone. Needs no lock. */
bool sim_state_forked(void);
/* What the calling thread knows. It is the thread's own. */
sim_thread_t *sim_state_thread(void);

/* Waits for any change with the lock released. False once everything stops: the caller returns
 * CUDA_ERROR_DEINITIALIZED. */
bool sim_state_wait(void);
/* The same, but not for long: for what other processes do, which is not announced. */
bool sim_state_wait_briefly(void);
void sim_state_changed(void);
/* Around a wait for work of the device, which tms_sim_wait_until_synchronizing waits for. */
void sim_state_begin_synchronizing(void);
void sim_state_end_synchronizing(void);
uint64_t sim_state_new_id(void);
/* Whether a stream's work is still to be done: nothing stops it, drops it, or has failed. */
bool sim_state_goes_on(const sim_stream_t *stream);

#endif
