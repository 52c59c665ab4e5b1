/* Other processes: their identity beyond a number, and the content of an IPC handle, which is a process and one of its
 * files. Both kinds of IPC handles have 64 bytes; the content occupies the first of them. The importing process opens the
 * file through /proc, which requires the same user. Owns nothing and needs no lock. */
#ifndef TMS_SIM_BASE_PROCESS_H
#define TMS_SIM_BASE_PROCESS_H

#include <cuda.h>
#include <stdbool.h>
#include <stdint.h>

/* Returns the start time of the process in clock ticks since boot, or 0 if the process does not exist or is a zombie. Number
 * and start time together identify a process uniquely. */
unsigned long long sim_process_started(int process);

typedef enum sim_ipc_kind { SIM_IPC_MEMORY = 0x6d656d73, SIM_IPC_EVENT = 0x65766e74 } sim_ipc_kind_t;

typedef struct sim_ipc_name {
    uint32_t kind;
    int process;
    int file;
    int device;
    uint64_t file_id; /* the inode: detects a process or file number that was reused */
    uint64_t offset;
    uint64_t bytes; /* the size that the program requested */
    uint64_t span;
} sim_ipc_name_t;

_Static_assert(sizeof(sim_ipc_name_t) <= CU_IPC_HANDLE_SIZE, "the handles are of this size");

/* Completes the name with the inode and writes the handle. CUDA_ERROR_OPERATING_SYSTEM if the file cannot be examined. */
CUresult sim_ipc_write(const sim_ipc_name_t *name, char *handle);
/* Reads a handle. Returns false if it is not of this kind. */
bool sim_ipc_read(sim_ipc_name_t *name, const char *handle, sim_ipc_kind_t kind);
/* Opens the file. Returns -1 if the process has exited or has closed it. The caller owns the descriptor. */
int sim_ipc_open(const sim_ipc_name_t *name);

#endif
