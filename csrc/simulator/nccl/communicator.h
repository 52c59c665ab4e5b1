/* Communicators: one rank's end of what the ranks share. Owns sim_state.communicators and what they hold of the device's
 * memory. Called with the simulator's lock held, which is given up while ranks are waited for. */
#ifndef TMS_SIM_NCCL_COMMUNICATOR_H
#define TMS_SIM_NCCL_COMMUNICATOR_H

#include "simulator/base/state.h"
#include "simulator/base/table.h"
#include "simulator/nccl/exchange.h"
#include "simulator/nccl/types.h"

enum { SIM_NCCL_TEXT_BYTES = 384 };

typedef struct sim_nccl_operation sim_nccl_operation_t; /* operation.h */

/* A reduction that the program made: a sum of multiples. */
typedef struct sim_nccl_factor {
    sim_nccl_type_t type;
    uint64_t address; /* on the device; 0: `value` is it */
    uint8_t value[sizeof(uint64_t)];
} sim_nccl_factor_t;

/* How far a communicator has come. */
typedef enum sim_nccl_stage {
    SIM_NCCL_WISHING, /* made out of another: until all have said what they want */
    SIM_NCCL_LOOKING, /* until the first of its ranks has made what they share */
    SIM_NCCL_JOINING, /* until all have taken their seats */
    SIM_NCCL_READY,
    SIM_NCCL_BROKEN, /* `error` says why */
} sim_nccl_stage_t;

typedef struct sim_nccl_comm {
    uint64_t id;
    unsigned references; /* the program's, and those of operations and of communicators that are made out of it */
    int device;
    bool waits; /* its calls wait until they are done: "blocking" */
    sim_nccl_stage_t stage;
    sim_nccl_place_t place; /* of what the ranks share */
    sim_nccl_exchange_t exchange;

    bool aborted;   /* what it does ends early, nothing more begins */
    bool finalized; /* nothing more begins */
    bool destroyed; /* the program's handle is gone */
    bool suspended;
    sim_nccl_result_t error; /* what it came to, for ncclCommGetAsyncError */
    char text[SIM_NCCL_TEXT_BYTES];
    uint64_t charged;

    uint64_t calls, steps;              /* of collectives, so far */
    bool busy;                          /* an operation is at work */
    sim_nccl_operation_t *first, *last; /* submitted to streams: they work in this order */
    sim_table_t factors;                /* by the number of the reduction */
    int reductions_made;
    sim_table_t registrations;

    uint64_t making;              /* the last that was made of this one, which takes its seat before the next is made */
    struct sim_nccl_comm *parent; /* of which it is made, in the first two stages */
    uint64_t number;              /* how many were made of that, with this one */
    sim_nccl_wish_t wish;
    uint64_t excluded; /* ranks of the parent that do not take part, a bit each */
} sim_nccl_comm_t;

/* The communicator that a handle names, or NULL. */
sim_nccl_comm_t *sim_nccl_find(sim_nccl_handle_t handle);
sim_nccl_handle_t sim_nccl_handle(const sim_nccl_comm_t *comm);
/* The same, where it can be used; else what the caller returns. */
sim_nccl_result_t sim_nccl_require(sim_nccl_handle_t handle, sim_nccl_comm_t **comm);
/* A new one, with one reference, the program's. */
sim_nccl_comm_t *sim_nccl_comm_new(int device, bool waits);
void sim_nccl_comm_retain(sim_nccl_comm_t *comm);
void sim_nccl_comm_release(sim_nccl_comm_t *comm);
/* Takes the program's handle away: the others see the rank leave in this way. */
void sim_nccl_comm_drop(sim_nccl_comm_t *comm, sim_nccl_presence_t how);
/* Memory of the device that it holds. */
sim_nccl_result_t sim_nccl_charge(sim_nccl_comm_t *comm);
void sim_nccl_credit(sim_nccl_comm_t *comm);
/* An error that is no call's: the first stays. stderr has it, too. */
void sim_nccl_comm_fail(sim_nccl_comm_t *comm, sim_nccl_result_t result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* All of them, for a reset. */
void sim_nccl_clear(void);

#endif
