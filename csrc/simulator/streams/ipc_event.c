/* IPC handles of events. */
#include <unistd.h>

#include "simulator/base/ipc.h"
#include "simulator/base/state.h"
#include "simulator/base/table.h"
#include "simulator/streams/entries.h"
#include "simulator/work/event.h"
#include "simulator/work/event_shared.h"

CUresult sim_ipc_event_handle(CUipcEventHandle *handle, CUevent event_handle) {
    const sim_event_t *event = sim_table_find(&sim_state.events, (uint64_t)(uintptr_t)event_handle);
    if (!handle) return CUDA_ERROR_INVALID_VALUE;
    if (!event) return CUDA_ERROR_INVALID_HANDLE;
    if (!event->shared || event->imported) return CUDA_ERROR_INVALID_VALUE;
    const sim_ipc_name_t name = {.kind = SIM_IPC_EVENT, .process = getpid(), .file = event->shared_file};
    return sim_ipc_write(&name, handle->reserved);
}

CUresult sim_ipc_open_event(CUevent *event, CUipcEventHandle handle) {
    sim_ipc_name_t name;
    if (!event) return CUDA_ERROR_INVALID_VALUE;
    if (!sim_ipc_read(&name, handle.reserved, SIM_IPC_EVENT)) return CUDA_ERROR_INVALID_VALUE;
    if (name.process == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
    int file = sim_ipc_open(&name);
    if (file < 0) return CUDA_ERROR_INVALID_HANDLE;
    sim_event_t *opened = sim_event_new(CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);
    if (!opened || !sim_event_attach(opened, file)) {
        if (opened) {
            sim_table_remove(&sim_state.events, opened->id);
            sim_event_release(opened);
        }
        close(file);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    opened->imported = true;
    *event = (CUevent)(uintptr_t)opened->id;
    return CUDA_SUCCESS;
}
