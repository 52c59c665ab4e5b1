/* What a handle for another process says: which file of which process. Both kinds of handles are 64 bytes, of which this
 * takes the first. The other process opens it through /proc, which the same user may. Owns nothing and needs no lock. */
#ifndef TMS_SIM_BASE_IPC_H
#define TMS_SIM_BASE_IPC_H

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

typedef enum sim_ipc_kind { SIM_IPC_MEMORY = 0x6d656d73, SIM_IPC_EVENT = 0x65766e74 } sim_ipc_kind_t;

typedef struct sim_ipc_name {
    uint32_t kind;
    int process;
    int file;
    int device;
    uint64_t file_id; /* its inode: a process that was given the same number has other files */
    uint64_t offset;
    uint64_t bytes; /* that the program asked for */
    uint64_t span;
} sim_ipc_name_t;

_Static_assert(sizeof(sim_ipc_name_t) <= CU_IPC_HANDLE_SIZE, "the handles are of this size");

/* Fills in the inode, and the handle. */
CUresult sim_ipc_write(const sim_ipc_name_t *name, char *handle);
/* False where the handle is not one of this kind. */
bool sim_ipc_read(sim_ipc_name_t *name, const char *handle, sim_ipc_kind_t kind);
/* The file, or -1 where the process is gone, or has closed it. */
int sim_ipc_open(const sim_ipc_name_t *name);

#endif
