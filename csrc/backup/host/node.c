#include "backup/host/node.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    NO_NODE = -1,
    MAX_NODES = 1024,
    PREFER = 1, /* MPOL_PREFERRED of <linux/mempolicy.h>: falls back to other nodes */
    LINE_BYTES = 256
};

static bool read_line(const char *root, const char *path, char line[LINE_BYTES]) {
    char name[PATH_MAX];
    int length = snprintf(name, sizeof name, "%s%s", root, path);
    FILE *file = length > 0 && (size_t)length < sizeof name ? fopen(name, "re") : NULL;
    if (!file) return false;
    bool got = fgets(line, LINE_BYTES, file) != NULL;
    fclose(file);
    return got;
}

int tms_host_node(tms_devices_t *devices, int device, const char *root) {
    const tms_error_context_t context = {.operation = "find the NUMA node of a device", .device = device};
    char line[LINE_BYTES], path[LINE_BYTES];
    /* The file contains "0" for one node, and "0-1" or "0,2" for several. */
    if (!read_line(root, "/sys/devices/system/node/online", line) || !strpbrk(line, "-,")) return NO_NODE;
    const tms_driver_table_t *driver = NULL;
    const tms_device_table_t *table = NULL;
    if (tms_devices_load(devices, &driver, &table, &context, NULL) != TMS_OK || !driver->cuDeviceGetAttribute)
        return NO_NODE;
    CUdevice handle = table->device[device].handle;
    int domain = 0, bus = 0, slot = 0, node = NO_NODE;
    if (driver->cuDeviceGetAttribute(&domain, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, handle) != CUDA_SUCCESS ||
        driver->cuDeviceGetAttribute(&bus, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, handle) != CUDA_SUCCESS ||
        driver->cuDeviceGetAttribute(&slot, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, handle) != CUDA_SUCCESS)
        return NO_NODE;
    (void)snprintf(path, sizeof path, "/sys/bus/pci/devices/%04x:%02x:%02x.0/numa_node", (unsigned)domain, (unsigned)bus,
                   (unsigned)slot);
    if (!read_line(root, path, line) || sscanf(line, "%d", &node) != 1) return NO_NODE;
    return node >= 0 && node < MAX_NODES ? node : NO_NODE;
}

void tms_host_node_prefer(void *memory, uint64_t bytes, int node) {
    enum { BITS = 8 * sizeof(unsigned long) };
    unsigned long nodes[MAX_NODES / BITS] = {0};
    if (node == NO_NODE) return;
    nodes[node / BITS] = 1ul << (node % BITS);
    /* Many containers do not permit this call. Memory of another NUMA node works as well, but is slower. */
    (void)syscall(SYS_mbind, memory, bytes, PREFER, nodes, (unsigned long)MAX_NODES, 0u);
}
