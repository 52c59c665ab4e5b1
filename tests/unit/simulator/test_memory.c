/* Guards the simulated GPU's virtual memory management: the driver's rules of reserving, mapping and access, with its
 * result codes. */
#include "support/memory_fixture.h"

static void reservations_are_exact(void **state) {
    CUdeviceptr address = 0, other = 0;
    (void)state;
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemAddressReserve, &address, 0, 0, 0, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemAddressReserve, &address, GRANULE + 1, 0, 0, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemAddressReserve, &address, GRANULE, 3, 0, 0));
    ASSERT_RESULT(CUDA_ERROR_OUT_OF_MEMORY, CALL(cuMemAddressReserve, &address, (uint64_t)1 << 62, 0, 0, 0));
    ASSERT_CUDA(CALL(cuMemAddressReserve, &address, 2 * GRANULE, 16 * GRANULE, 0, 0));
    assert_int_equal(address % (16 * GRANULE), 0);
    assert_false(is_readable(address));
    ASSERT_CUDA(CALL(cuMemAddressReserve, &other, 2 * GRANULE, 0, address, 0)); /* a hint that is in use is no error */
    assert_int_not_equal(address, other);
    assert_int_equal(usage_of(0).reservations, 2);
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemAddressFree, address, GRANULE));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemAddressFree, address + GRANULE, GRANULE));
    ASSERT_CUDA(CALL(cuMemAddressFree, address, 2 * GRANULE));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemAddressFree, address, 2 * GRANULE));
    CUdeviceptr hinted = 0;
    ASSERT_CUDA(CALL(cuMemAddressReserve, &hinted, 2 * GRANULE, 0, address, 0));
    assert_int_equal(hinted, address);
    ASSERT_CUDA(CALL(cuMemAddressFree, hinted, 2 * GRANULE));
    ASSERT_CUDA(CALL(cuMemAddressFree, other, 2 * GRANULE));
}

static void physical_memory_is_charged(void **state) {
    CUmemGenericAllocationHandle all = 0, more = 0;
    CUmemAllocationProp properties = pinned_on(0), absent = pinned_on(1), host = pinned_on(0);
    size_t available = 0, total = 0;
    (void)state;
    host.location.type = (CUmemLocationType)2; /* CU_MEM_LOCATION_TYPE_HOST, since CUDA 12.2 */
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemCreate, &all, 0, &properties, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemCreate, &all, GRANULE / 2, &properties, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemCreate, &all, GRANULE, NULL, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_DEVICE, CALL(cuMemCreate, &all, GRANULE, &absent, 0));
    ASSERT_RESULT(CUDA_ERROR_NOT_SUPPORTED, CALL(cuMemCreate, &all, GRANULE, &host, 0));
    ASSERT_CUDA(CALL(cuMemCreate, &all, DEVICE_MEMORY, &properties, 0));
    ASSERT_RESULT(CUDA_ERROR_OUT_OF_MEMORY, CALL(cuMemCreate, &more, GRANULE, &properties, 0));
    assert_int_equal(more, 0);
    ASSERT_CUDA(CALL(cuMemGetInfo_v2, &available, &total));
    assert_int_equal(available, 0);
    assert_int_equal(total, DEVICE_MEMORY);
    ASSERT_CUDA(CALL(cuMemRelease, all));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemRelease, all));
    ASSERT_CUDA(CALL(cuMemCreate, &more, GRANULE, &properties, 0));
    assert_int_not_equal(all, more);
    ASSERT_CUDA(CALL(cuMemRelease, more));
}

static void memory_taken_by_others_counts(void **state) {
    CUmemGenericAllocationHandle handle = 0;
    CUmemAllocationProp properties = pinned_on(0);
    (void)state;
    assert_int_equal(CALL(take_memory, 0, (int64_t)DEVICE_MEMORY), 0);
    assert_int_equal(CALL(take_memory, 0, 1), 2);
    ASSERT_RESULT(CUDA_ERROR_OUT_OF_MEMORY, CALL(cuMemCreate, &handle, GRANULE, &properties, 0));
    assert_int_equal(CALL(take_memory, 0, -(int64_t)GRANULE), 0);
    ASSERT_CUDA(CALL(cuMemCreate, &handle, GRANULE, &properties, 0));
    assert_int_equal(usage_of(0).physical_bytes, GRANULE);
    ASSERT_CUDA(CALL(cuMemRelease, handle));
    assert_int_equal(CALL(take_memory, 0, -(int64_t)DEVICE_MEMORY), 2);
}

static void mapping_takes_whole_handles_at_granules(void **state) {
    CUmemGenericAllocationHandle handle = 0;
    CUmemAllocationProp properties = pinned_on(0);
    CUdeviceptr address = 0;
    (void)state;
    ASSERT_CUDA(CALL(cuMemAddressReserve, &address, 4 * GRANULE, 0, 0, 0));
    ASSERT_CUDA(CALL(cuMemCreate, &handle, 2 * GRANULE, &properties, 0));
    ASSERT_RESULT(CUDA_ERROR_NOT_SUPPORTED, CALL(cuMemMap, address, GRANULE, GRANULE, handle, 0));
    ASSERT_RESULT(CUDA_ERROR_NOT_SUPPORTED, CALL(cuMemMap, address, GRANULE, 0, handle, 0));
    ASSERT_RESULT(CUDA_ERROR_NOT_SUPPORTED, CALL(cuMemMap, address, 4 * GRANULE, 0, handle, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemMap, address + 4096, 2 * GRANULE, 0, handle, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemMap, address + 3 * GRANULE, 2 * GRANULE, 0, handle, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemMap, address, 2 * GRANULE, 0, handle + 1, 0));
    ASSERT_CUDA(CALL(cuMemMap, address, 2 * GRANULE, 0, handle, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemMap, address, 2 * GRANULE, 0, handle, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemMap, address + GRANULE, 2 * GRANULE, 0, handle, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemAddressFree, address, 4 * GRANULE)); /* while mapped */
    assert_false(is_readable(address));                                                    /* no access yet */
    assert_int_equal(usage_of(0).mappings, 1);
    ASSERT_CUDA(CALL(cuMemUnmap, address, 2 * GRANULE));
    ASSERT_CUDA(CALL(cuMemRelease, handle));
    ASSERT_CUDA(CALL(cuMemAddressFree, address, 4 * GRANULE));
}

static void one_handle_shows_at_two_addresses(void **state) {
    block_t block = make_block(0, GRANULE);
    CUmemAccessDesc access = access_for(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CUdeviceptr alias = 0;
    (void)state;
    ASSERT_CUDA(CALL(cuMemAddressReserve, &alias, GRANULE, 0, 0, 0));
    ASSERT_CUDA(CALL(cuMemMap, alias, GRANULE, 0, block.handle, 0));
    ASSERT_CUDA(CALL(cuMemSetAccess, alias, GRANULE, &access, 1));
    ASSERT_CUDA(CALL(cuMemsetD8_v2, block.address, 7, GRANULE));
    ASSERT_CUDA(CALL(cuCtxSynchronize));
    assert_bytes(alias, GRANULE, 7);
    ASSERT_CUDA(CALL(cuMemUnmap, alias, GRANULE));
    assert_bytes(block.address, GRANULE, 7);
    ASSERT_CUDA(CALL(cuMemAddressFree, alias, GRANULE));
    drop_block(&block);
}

static void access_needs_fully_mapped_ranges(void **state) {
    CUmemGenericAllocationHandle handle = 0;
    CUmemAllocationProp properties = pinned_on(0);
    CUmemAccessDesc write = access_for(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CUmemAccessDesc read = access_for(0, CU_MEM_ACCESS_FLAGS_PROT_READ), absent = access_for(1, read.flags);
    CUmemLocation location = write.location;
    CUdeviceptr address = 0;
    unsigned long long flags = 99;
    (void)state;
    ASSERT_CUDA(CALL(cuMemAddressReserve, &address, 2 * GRANULE, 0, 0, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemSetAccess, address, GRANULE, &write, 1));
    ASSERT_CUDA(CALL(cuMemCreate, &handle, GRANULE, &properties, 0));
    ASSERT_CUDA(CALL(cuMemMap, address, GRANULE, 0, handle, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemSetAccess, address, 2 * GRANULE, &write, 1));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemSetAccess, address, GRANULE, &write, 0));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemSetAccess, address, GRANULE, &absent, 1));
    ASSERT_CUDA(CALL(cuMemGetAccess, &flags, &location, address));
    assert_int_equal(flags, CU_MEM_ACCESS_FLAGS_PROT_NONE);
    ASSERT_CUDA(CALL(cuMemSetAccess, address, GRANULE, &read, 1));
    ASSERT_CUDA(CALL(cuMemGetAccess, &flags, &location, address));
    assert_int_equal(flags, CU_MEM_ACCESS_FLAGS_PROT_READ);
    assert_bytes(address, GRANULE, TMS_SIM_POISON);
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemsetD8_v2, address, 0, 1)); /* readable only */
    ASSERT_CUDA(CALL(cuMemSetAccess, address, GRANULE, &write, 1));
    ASSERT_CUDA(CALL(cuMemsetD8_v2, address, 0, 1));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemGetAccess, &flags, &location, address + GRANULE));
    ASSERT_CUDA(CALL(cuMemUnmap, address, GRANULE));
    ASSERT_CUDA(CALL(cuMemRelease, handle));
    ASSERT_CUDA(CALL(cuMemAddressFree, address, 2 * GRANULE));
}

static void unmapping_takes_whole_mappings(void **state) {
    enum { PIECES = 3 };
    CUmemGenericAllocationHandle handle[PIECES];
    CUmemAllocationProp properties = pinned_on(0);
    CUmemAccessDesc access = access_for(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CUdeviceptr address = 0;
    const uint64_t piece = 2 * GRANULE, bytes = PIECES * piece;
    (void)state;
    ASSERT_CUDA(CALL(cuMemAddressReserve, &address, bytes, 0, 0, 0));
    ASSERT_CUDA(CALL(cuMemUnmap, address, piece)); /* nothing there: no effect */
    for (int i = 0; i < PIECES; i++) {
        ASSERT_CUDA(CALL(cuMemCreate, &handle[i], piece, &properties, 0));
        ASSERT_CUDA(CALL(cuMemMap, address + (uint64_t)i * piece, piece, 0, handle[i], 0));
    }
    ASSERT_CUDA(CALL(cuMemSetAccess, address, bytes, &access, 1)); /* one call over several handles */
    assert_bytes(address, bytes, TMS_SIM_POISON);
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemUnmap, address, GRANULE));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemUnmap, address + GRANULE, piece));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemUnmap, address, piece + GRANULE));
    ASSERT_RESULT(CUDA_ERROR_INVALID_VALUE, CALL(cuMemUnmap, address, 0));
    assert_int_equal(usage_of(0).mappings, PIECES);
    ASSERT_CUDA(CALL(cuMemUnmap, address + piece, piece));
    assert_int_equal(usage_of(0).mappings, PIECES - 1);
    ASSERT_CUDA(CALL(cuMemUnmap, address, bytes)); /* a hole */
    assert_int_equal(usage_of(0).mappings, 0);
    for (int i = 0; i < PIECES; i++) ASSERT_CUDA(CALL(cuMemMap, address + (uint64_t)i * piece, piece, 0, handle[i], 0));
    ASSERT_CUDA(CALL(cuMemUnmap, address, bytes)); /* one call over several handles */
    assert_int_equal(usage_of(0).mappings, 0);
    assert_false(is_readable(address));
    for (int i = 0; i < PIECES; i++) ASSERT_CUDA(CALL(cuMemRelease, handle[i]));
    ASSERT_CUDA(CALL(cuMemAddressFree, address, bytes));
}

int main(void) {
#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one_gpu, teardown_gpus)
    const struct CMUnitTest tests[] = {
        ONE(reservations_are_exact),
        ONE(physical_memory_is_charged),
        ONE(memory_taken_by_others_counts),
        ONE(mapping_takes_whole_handles_at_granules),
        ONE(one_handle_shows_at_two_addresses),
        ONE(access_needs_fully_mapped_ranges),
        ONE(unmapping_takes_whole_mappings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
