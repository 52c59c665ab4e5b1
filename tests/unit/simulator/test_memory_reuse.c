/* Guards the simulated GPU's physical memory: the bytes, when it is free and reused, and exported handles. */
#include "support/memory_fixture.h"

static const uint64_t EDGE = 64 << 10; /* of a large allocation: what is poisoned at each end */

static void memory_is_free_when_unmapped_and_released(void **state) {
    block_t block = make_block(0, 2 * GRANULE);
    CUmemGenericAllocationHandle retained = 0;
    (void)state;
    ASSERT_CUDA(CALL(cuMemRelease, block.handle));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemRelease, block.handle));
    assert_int_equal(usage_of(0).physical_bytes, 2 * GRANULE); /* still mapped */
    assert_bytes(block.address, block.bytes, TMS_SIM_POISON);
    ASSERT_CUDA(CALL(cuMemRetainAllocationHandle, &retained, (void *)(uintptr_t)(block.address + GRANULE)));
    assert_int_equal(retained, block.handle);
    ASSERT_CUDA(CALL(cuMemUnmap, block.address, block.bytes));
    assert_int_equal(usage_of(0).physical_bytes, 2 * GRANULE); /* it is held elsewhere */
    assert_int_equal(usage_of(0).handles, 1);
    ASSERT_CUDA(CALL(cuMemRelease, retained));
    assert_int_equal(usage_of(0).physical_bytes, 0);
    assert_int_equal(usage_of(0).handles, 0);
    ASSERT_CUDA(CALL(cuMemAddressFree, block.address, block.bytes));
}

static void bytes_go_with_the_physical_memory(void **state) {
    block_t block = make_block(0, GRANULE);
    CUmemAllocationProp properties = pinned_on(0);
    CUmemAccessDesc access = access_for(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    (void)state;
    memset((void *)(uintptr_t)block.address, 3, GRANULE);
    ASSERT_CUDA(CALL(cuMemUnmap, block.address, GRANULE));
    assert_false(is_readable(block.address));
    ASSERT_CUDA(CALL(cuMemMap, block.address, GRANULE, 0, block.handle, 0)); /* kept handle: kept bytes */
    ASSERT_CUDA(CALL(cuMemSetAccess, block.address, GRANULE, &access, 1));
    assert_bytes(block.address, GRANULE, 3);
    unmap_block(&block);
    ASSERT_CUDA(CALL(cuMemCreate, &block.handle, GRANULE, &properties, 0)); /* new handle: poison */
    ASSERT_CUDA(CALL(cuMemMap, block.address, GRANULE, 0, block.handle, 0));
    ASSERT_CUDA(CALL(cuMemSetAccess, block.address, GRANULE, &access, 1));
    assert_bytes(block.address, GRANULE, TMS_SIM_POISON);
    drop_block(&block);
}

static void large_memory_is_poisoned_at_its_ends(void **state) {
    (void)state;
    CALL(set_poison_limit, 4 * MIB);
    block_t small = make_block(0, 4 * MIB), large = make_block(0, 8 * MIB);
    assert_bytes(small.address, small.bytes, TMS_SIM_POISON);
    assert_bytes(large.address, EDGE, TMS_SIM_POISON);
    assert_bytes(large.address + EDGE, large.bytes - 2 * EDGE, 0);
    assert_bytes(large.address + large.bytes - EDGE, EDGE, TMS_SIM_POISON);
    CALL(set_poison_limit, 8 * MIB);
    drop_block(&small);
    drop_block(&large);
}

/* The size of the file of the device's memory, and its resident size on the host. */
static struct stat memory_file(void) {
    enum { LIMIT = 1024, NAME_BYTES = 64 };
    struct stat status = {.st_size = 0};
    char path[NAME_BYTES], target[NAME_BYTES] = "";
    for (int file = 0; file < LIMIT; file++) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", file);
        ssize_t length = readlink(path, target, sizeof target - 1);
        target[length < 0 ? 0 : length] = '\0';
        if (strncmp(target, "/memfd:simulated GPU ", strlen("/memfd:simulated GPU ")) != 0) continue;
        assert_int_equal(fstat(file, &status), 0);
        return status;
    }
    fail_msg("no file of the device's memory");
    return status;
}

static uint64_t host_bytes(void) {
    enum { BLOCK_BYTES = 512 }; /* what st_blocks counts */
    return (uint64_t)memory_file().st_blocks * BLOCK_BYTES;
}

static void freed_memory_is_used_again_without_its_contents(void **state) {
    (void)state;
    CALL(set_poison_limit, 4 * MIB);
    block_t small = make_block(0, 4 * MIB), large = make_block(0, 16 * MIB);
    off_t end = memory_file().st_size;
    memset((void *)(uintptr_t)small.address, 7, small.bytes);
    memset((void *)(uintptr_t)(large.address + 5 * MIB), 7, MIB);
    drop_block(&small);
    drop_block(&large);
    assert_int_equal(usage_of(0).physical_bytes, 0);
    small = make_block(0, 4 * MIB);
    large = make_block(0, 16 * MIB);
    assert_int_equal(memory_file().st_size, end);
    assert_bytes(small.address, small.bytes, TMS_SIM_POISON);
    assert_bytes(large.address, EDGE, TMS_SIM_POISON);
    assert_bytes(large.address + EDGE, 5 * MIB - EDGE, 0);
    assert_bytes(large.address + 5 * MIB, MIB, TMS_SIM_POISON);
    assert_bytes(large.address + 6 * MIB, 10 * MIB - EDGE, 0);
    assert_bytes(large.address + 16 * MIB - EDGE, EDGE, TMS_SIM_POISON);
    drop_block(&small);
    memset((void *)(uintptr_t)large.address, 7, large.bytes);
    drop_block(&large); /* has more pages than would be filled with poison */
    assert_int_equal(host_bytes(), 4 * MIB);
    large = make_block(0, 16 * MIB);
    assert_int_equal(memory_file().st_size, end + (off_t)(16 * MIB));
    assert_bytes(large.address + EDGE, 16 * MIB - 2 * EDGE, 0);
    drop_block(&large);
    CALL(set_poison_limit, 8 * MIB);
}

/* Each search visits the pages of everything behind: with 2000 allocations a pause took half a minute. */
static void small_memory_is_not_searched_for_pages(void **state) {
    (void)state;
    atomic_store(&searches, 0);
    block_t blocks[] = {make_block(0, GRANULE), make_block(0, 8 * MIB), make_block(0, GRANULE)};
    for (size_t i = 0; i < 3; i++) drop_block(&blocks[i]);
    assert_int_equal(atomic_load(&searches), 0);
    block_t large = make_block(0, 16 * MIB);
    drop_block(&large);
    assert_true(atomic_load(&searches) > 0);
}

static void not_much_freed_memory_is_kept(void **state) {
    size_t available = 0, total = 0;
    (void)state;
    CALL(set_poison_limit, DEVICE_MEMORY);
    block_t block = make_block(0, 40 * MIB);
    drop_block(&block);
    assert_int_equal(host_bytes(), 40 * MIB);
    block = make_block(0, 32 * MIB);
    drop_block(&block);
    assert_int_equal(host_bytes(), 32 * MIB);
    ASSERT_CUDA(CALL(cuMemGetInfo_v2, &available, &total));
    assert_int_equal(available, total); /* whatever the host holds */
    CALL(set_poison_limit, 0);
    block = make_block(0, 32 * MIB);
    drop_block(&block);
    assert_int_equal(host_bytes(), 0);
    CALL(set_poison_limit, 8 * MIB);
}

static void memory_that_others_may_see_is_not_used_again(void **state) {
    CUipcMemHandle handle;
    void *memory = NULL;
    (void)state;
    ASSERT_CUDA(CALL(cudaMalloc, &memory, GRANULE));
    ASSERT_CUDA(CALL(cudaFree, memory));
    off_t end = memory_file().st_size;
    ASSERT_CUDA(CALL(cudaMalloc, &memory, GRANULE));
    assert_int_equal(memory_file().st_size, end);
    ASSERT_CUDA(CALL(cudaIpcGetMemHandle, &handle, memory));
    ASSERT_CUDA(CALL(cudaFree, memory));
    ASSERT_CUDA(CALL(cudaMalloc, &memory, GRANULE));
    assert_int_equal(memory_file().st_size, end + (off_t)GRANULE);
    ASSERT_CUDA(CALL(cudaFree, memory));
}

static unsigned count_files(void) {
    enum { LIMIT = 1024 };
    unsigned open_files = 0;
    for (int file = 0; file < LIMIT; file++) open_files += fcntl(file, F_GETFD) >= 0;
    return open_files;
}

static void handles_cost_no_file_each(void **state) {
    enum { HANDLES = 24 };
    CUmemGenericAllocationHandle handle[HANDLES];
    CUmemAllocationProp properties = pinned_on(0);
    (void)state;
    ASSERT_CUDA(CALL(cuMemCreate, &handle[0], GRANULE, &properties, 0));
    unsigned before = count_files();
    for (int i = 1; i < HANDLES; i++) ASSERT_CUDA(CALL(cuMemCreate, &handle[i], GRANULE, &properties, 0));
    assert_int_equal(count_files(), before);
    for (int i = 0; i < HANDLES; i++) ASSERT_CUDA(CALL(cuMemRelease, handle[i]));
}

static const CUmemAllocationHandleType as_file = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

static void only_memory_created_for_export_is_exported(void **state) {
    block_t block = make_block(0, GRANULE);
    int file = -1;
    (void)state;
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemExportToShareableHandle, &file, block.handle, as_file, 0));
    assert_int_equal(file, -1);
    drop_block(&block);
}

static void an_exported_handle_is_the_same_memory(void **state) {
    block_t block = {.bytes = GRANULE}, other = make_block(0, GRANULE);
    CUmemAllocationProp properties = pinned_on(0);
    CUmemAccessDesc access = access_for(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CUmemGenericAllocationHandle imported = 0;
    CUdeviceptr second = 0;
    int file = -1;
    (void)state;
    properties.requestedHandleTypes = as_file;
    ASSERT_CUDA(CALL(cuMemCreate, &block.handle, GRANULE, &properties, 0));
    ASSERT_CUDA(CALL(cuMemAddressReserve, &block.address, GRANULE, 0, 0, 0));
    ASSERT_CUDA(CALL(cuMemAddressReserve, &second, GRANULE, 0, 0, 0));
    ASSERT_CUDA(CALL(cuMemMap, block.address, GRANULE, 0, block.handle, 0));
    ASSERT_CUDA(CALL(cuMemSetAccess, block.address, GRANULE, &access, 1));
    memset((void *)(uintptr_t)block.address, 21, GRANULE);
    ASSERT_CUDA(CALL(cuMemExportToShareableHandle, &file, block.handle, as_file, 0));
    assert_bytes(block.address, GRANULE, 21); /* although it has moved */
    assert_bytes(other.address, GRANULE, TMS_SIM_POISON);
    ASSERT_CUDA(CALL(cuMemImportFromShareableHandle, &imported, (void *)(intptr_t)file, as_file));
    assert_int_not_equal(imported, block.handle);
    ASSERT_CUDA(CALL(cuMemMap, second, GRANULE, 0, imported, 0));
    ASSERT_CUDA(CALL(cuMemSetAccess, second, GRANULE, &access, 1));
    memset((void *)(uintptr_t)second, 22, GRANULE / 2);
    assert_bytes(block.address, GRANULE / 2, 22);
    assert_bytes(block.address + GRANULE / 2, GRANULE / 2, 21);
    assert_int_equal(usage_of(0).physical_bytes, 2 * GRANULE);
    ASSERT_CUDA(CALL(cuMemUnmap, second, GRANULE));
    ASSERT_CUDA(CALL(cuMemRelease, imported));
    drop_block(&block);
    assert_int_equal(usage_of(0).physical_bytes, 2 * GRANULE); /* the descriptor keeps it */
    int duplicate = dup(file);
    assert_int_equal(close(file), 0);
    assert_int_equal(usage_of(0).physical_bytes, 2 * GRANULE);
    assert_int_equal(close(duplicate), 0);
    assert_int_equal(usage_of(0).physical_bytes, GRANULE);
    ASSERT_CUDA(CALL(cuMemAddressFree, second, GRANULE));
    drop_block(&other);
}

int main(void) {
#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_gpu, teardown_gpus)
    const struct CMUnitTest tests[] = {
        ONE(memory_is_free_when_unmapped_and_released),    ONE(bytes_go_with_the_physical_memory),
        ONE(large_memory_is_poisoned_at_its_ends),         ONE(freed_memory_is_used_again_without_its_contents),
        ONE(small_memory_is_not_searched_for_pages),       ONE(not_much_freed_memory_is_kept),
        ONE(memory_that_others_may_see_is_not_used_again), ONE(handles_cost_no_file_each),
        ONE(only_memory_created_for_export_is_exported),   ONE(an_exported_handle_is_the_same_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
