/* Reports resources that are in use at exit: those still owned, such as a framework's cache, and leaks. */
#include "simulator/control/report.h"

#include <stdio.h>

#include "simulator/base/state.h"
#include "simulator/memory/physical.h"

void sim_report(void) {
    sim_memory_sweep();
    bool clean = !sim_state.reserved && !sim_state.host_bytes;
    for (int i = 0; i < sim_state.device_count; i++) {
        const sim_device_t *device = &sim_state.devices[i];
        if (!device->used && !device->mappings && !device->streams) continue;
        clean = false;
        fprintf(stderr,
                "simulated GPU: in use at the end on device %d: %llu bytes in %llu handles and %llu runtime allocations, "
                "%llu mappings, "
                "%llu streams\n",
                i, (unsigned long long)device->used, (unsigned long long)device->handles,
                (unsigned long long)device->runtime_allocations, (unsigned long long)device->mappings,
                (unsigned long long)device->streams);
    }
    if (sim_state.reserved || sim_state.host_bytes)
        fprintf(stderr,
                "simulated GPU: in use at the end in the process: %llu reservations, %llu bytes of pinned host memory\n",
                (unsigned long long)sim_state.reserved, (unsigned long long)sim_state.host_bytes);
    if (clean) fprintf(stderr, "simulated GPU: nothing in use at the end\n");
}
