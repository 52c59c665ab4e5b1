/* Finds the NUMA node closest to a device, and makes the system prefer it. Any thread, no lock, no state. */
#ifndef TMS_HOST_NODE_H
#define TMS_HOST_NODE_H

#include "device/device.h"

/* Returns the NUMA node of a device, from the system's list of PCI devices under `root`, or -1 if there is only one node or
 * the node is unknown. */
int tms_host_node(tms_devices_t *devices, int device, const char *root);
/* Makes the system prefer a NUMA node for this memory; -1: no preference. A failure is ignored. */
void tms_host_node_prefer(void *memory, uint64_t bytes, int node);

#endif
