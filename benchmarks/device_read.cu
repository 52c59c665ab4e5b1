/* Reads device memory once, as fast as it goes: the limit that the fingerprint kernel is compared with.
 *
 * device_read(memory, vectors, result): `vectors` of 16 bytes. Compiled to PTX by tools/compile_kernels.py. */
extern "C" __global__ void __launch_bounds__(256) device_read(const uint4 *memory, unsigned long long vectors,
                                                              unsigned int *result) {
    const unsigned long long step = (unsigned long long)gridDim.x * 256;
    unsigned long long place = (unsigned long long)blockIdx.x * 256 + threadIdx.x;
    unsigned int sum = 0;
    for (; place + 7 * step < vectors; place += 8 * step) {
        uint4 vector[8];
#pragma unroll
        for (int i = 0; i < 8; i++) vector[i] = __ldcs(memory + place + i * step);
#pragma unroll
        for (int i = 0; i < 8; i++) sum ^= vector[i].x ^ vector[i].y ^ vector[i].z ^ vector[i].w;
    }
    for (; place < vectors; place += step) {
        const uint4 vector = __ldcs(memory + place);
        sum ^= vector.x ^ vector.y ^ vector.z ^ vector.w;
    }
    if (sum == 0x5EED5EEDu) *result = sum; /* so that the compiler keeps the loads */
}
