/* Communicators: one rank's state and its end of the shared exchange. Owns sim_state.communicators and their charge of
 * device memory. Called with the simulator's lock held; waits for other ranks release it. */
#ifndef TMS_SIM_NCCL_COMMUNICATOR_H
#define TMS_SIM_NCCL_COMMUNICATOR_H

#include "simulator/base/simulation.h"
#include "simulator/base/table.h"
#include "simulator/nccl/exchange.h"
#include "simulator/nccl/types.h"

enum { SIM_NCCL_TEXT_BYTES = 384 };

typedef struct sim_nccl_operation sim_nccl_operation_t; /* operation.h */

/* A reduction that the program created: a sum of scaled inputs. */
typedef struct sim_nccl_factor {
    sim_nccl_type_t type;
    uint64_t address; /* in device memory; 0: use `value` */
    uint8_t value[sizeof(uint64_t)];
} sim_nccl_factor_t;

/* The setup stages of a communicator. */
typedef enum sim_nccl_stage {
    SIM_NCCL_SPLITTING, /* derived from a parent: waits for the split requests of all ranks */
    SIM_NCCL_LOCATING,  /* derived: waits until its first rank has created the exchange */
    SIM_NCCL_JOINING,   /* waits until all ranks have joined */
    SIM_NCCL_READY,
    SIM_NCCL_BROKEN, /* setup failed with `error` */
} sim_nccl_stage_t;

typedef struct sim_nccl_comm {
    uint64_t id;
    unsigned references; /* held by the program, operations and derived communicators */
    int device;
    bool blocking; /* config.blocking */
    sim_nccl_stage_t stage;
    sim_nccl_location_t location; /* the exchange file */
    sim_nccl_exchange_t exchange;

    bool aborted;   /* running work is cancelled; new work is refused */
    bool finalized; /* new work is refused */
    bool destroyed; /* the program's handle is invalid */
    bool suspended;
    sim_nccl_result_t error; /* result for ncclCommGetAsyncError */
    char text[SIM_NCCL_TEXT_BYTES];
    uint64_t charged;

    uint64_t calls, steps;              /* collectives, and their steps */
    bool busy;                          /* an operation is running */
    sim_nccl_operation_t *first, *last; /* submitted operations, executed in this order */
    sim_table_t factors;                /* by reduction number */
    int reductions_made;
    sim_table_t registrations;

    uint64_t derived;             /* id of the last derived communicator; it must join before the next is derived */
    struct sim_nccl_comm *parent; /* the parent, during the first two stages */
    uint64_t number;              /* sequence number among the parent's derived communicators */
    sim_nccl_split_request_t split;
    uint64_t excluded; /* bit mask of the parent's ranks that do not take part */
} sim_nccl_comm_t;

/* Returns the communicator of a handle, or NULL. */
sim_nccl_comm_t *sim_nccl_find(sim_nccl_handle_t handle);
sim_nccl_handle_t sim_nccl_handle(const sim_nccl_comm_t *comm);
/* Finds the communicator of a handle, if it is usable. Otherwise returns the error for the caller. */
sim_nccl_result_t sim_nccl_require(sim_nccl_handle_t handle, sim_nccl_comm_t **comm);
/* Creates a communicator with one reference for the program. NULL if out of memory. */
sim_nccl_comm_t *sim_nccl_comm_new(int device, bool blocking);
void sim_nccl_comm_retain(sim_nccl_comm_t *comm);
void sim_nccl_comm_release(sim_nccl_comm_t *comm);
/* Invalidates the program's handle and drops its reference. Other ranks observe `how`. */
void sim_nccl_comm_drop(sim_nccl_comm_t *comm, sim_nccl_presence_t how);
/* Charges and credits the device memory that the communicator holds. */
sim_nccl_result_t sim_nccl_charge(sim_nccl_comm_t *comm);
void sim_nccl_credit(sim_nccl_comm_t *comm);
/* Sets an asynchronous error and reports it on stderr. Keeps the first error. */
void sim_nccl_comm_fail(sim_nccl_comm_t *comm, sim_nccl_result_t result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Destroys all communicators; for a reset. */
void sim_nccl_clear(void);

#endif
