/* The NUMA node that a device is attached to. Any thread, no lock, no state. */
#ifndef TMS_HOST_NODE_H
#define TMS_HOST_NODE_H

#include "device/device.h"

/* The NUMA node of a device, from the system's list of PCI devices under `root`; -1 where there is one node only, or it is
 * not known. */
int tms_host_node(tms_devices_t *devices, int device, const char *root);
/* Asks the system to take memory from a NUMA node as long as that has some; -1: from any. */
void tms_host_node_prefer(void *memory, uint64_t bytes, int node);

#endif
