/* Guards the NUMA node of a device, and the memory policy that the system gets for it. */

#include "support/host_fixture.h"

#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "backup/host/node.h"
#include "temporary.h"

static char root[TEMPORARY_BYTES];

static void put_below(const char *folder, const char *name, const char *text) {
    char command[4 * TEMPORARY_BYTES];
    (void)snprintf(command, sizeof command, "mkdir -p '%s%s' && echo '%s' > '%s%s/%s'", root, folder, text, root, folder,
                   name);
    assert_int_equal(system(command), 0);
}

static void memory_is_requested_from_the_node_of_its_device(void **state) {
    host_fixture_t *f = *state;
    int bus = 0, slot = 0;
    char folder[TEMPORARY_BYTES];
    enum { WHERE = 1 << 1, PREFER = 1 }; /* MPOL_F_ADDR, MPOL_PREFERRED */
    int mode = -1;
    assert_non_null(make_temporary_directory(root, "host-node"));
    ASSERT_CUDA(CALL(cuDeviceGetAttribute, &bus, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 1));
    ASSERT_CUDA(CALL(cuDeviceGetAttribute, &slot, CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, 1));
    (void)snprintf(folder, sizeof folder, "/sys/bus/pci/devices/0000:%02x:%02x.0", (unsigned)bus, (unsigned)slot);
    assert_int_equal(tms_host_node(&f->devices, 1, root), -1);
    put_below("/sys/devices/system/node", "online", "0-1");
    assert_int_equal(tms_host_node(&f->devices, 1, root), -1);
    put_below(folder, "numa_node", "1");
    assert_int_equal(tms_host_node(&f->devices, 1, root), 1);
    assert_int_equal(tms_host_node(&f->devices, 0, root), -1); /* another device's folder */
    put_below(folder, "numa_node", "-1");
    assert_int_equal(tms_host_node(&f->devices, 1, root), -1);
    put_below("/sys/devices/system/node", "online", "0");
    put_below(folder, "numa_node", "0");
    assert_int_equal(tms_host_node(&f->devices, 1, root), -1); /* there is no other node to choose */
    /* The policy that the system gets. Every machine has node 0; some do not allow the query. */
    void *memory = mmap(NULL, 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    tms_host_node_prefer(memory, 2 * MIB, -1);
    if (syscall(SYS_get_mempolicy, &mode, NULL, 0, memory, WHERE) == 0) {
        assert_int_not_equal(mode, PREFER);
        tms_host_node_prefer(memory, 2 * MIB, 0);
        assert_int_equal(syscall(SYS_get_mempolicy, &mode, NULL, 0, memory, WHERE), 0);
        assert_int_equal(mode, PREFER);
    }
    munmap(memory, 2 * MIB);
    assert_int_equal(remove_temporary_directory(root), 0);
}

#define TEST(test) cmocka_unit_test_setup_teardown(test, setup_host, teardown_host)

int main(void) {
    const struct CMUnitTest tests[] = {TEST(memory_is_requested_from_the_node_of_its_device)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
