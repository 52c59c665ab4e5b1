/* The fingerprint of a chunk of device memory: 128 bits that show whether its contents have changed.
 *
 * The contents are words m[0..n) of 32 bits. The key has random words k and random 64-bit numbers c. Four sums are computed,
 * each with the words of the key shifted by one vector (four words) more than the sum before:
 *
 *   S[t] = sum over even i of (m[i] + k[i + 4t]) * (m[i + 1] + k[i + 1 + 4t])      words mod 2^32, products and sum mod 2^64
 *
 * This is NH with a Toeplitz key (Black, Halevi, Krawczyk, Krovetz and Rogaway: UMAC, CRYPTO 1999). For two different
 * contents of one length, all four sums are equal with a probability of at most 2^-128 over the choice of the key. Each sum
 * is then mixed by a bijection, the finalizer of SplitMix64 (Steele, Lea and Flood, 2014), so that a change of one bit of
 * the contents changes each bit of the result in half of the cases. The halves h[0..8) of the mixed sums are reduced to 128
 * bits by a multilinear function (Lemire and Kaser, 2014):
 *
 *   F[i] = upper half of (c[i][8] + sum over j of c[i][j] * h[j])                  mod 2^64
 *
 * This function maps different sums to equal fingerprints with a probability of at most 2^-128. So two different contents
 * have equal fingerprints with a probability of at most 2^-127. The key is drawn at random for each process, and does not
 * depend on the contents. A program that knows the key can make collisions; a fingerprint is no protection against that.
 *
 * The kernel is in csrc/kernels/fingerprint.cu, and compiled to PTX by tools/compile_kernels.py. The simulated GPU has the
 * same function in C. The names and layouts below are shared by the kernel and its callers. */
#ifndef TMS_FINGERPRINT_H
#define TMS_FINGERPRINT_H

#ifndef __CUDACC_RTC__
#include <stdint.h>
#else
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#endif

/* Multipliers of the finalizer. */
#define TMS_FINGERPRINT_MIX_1 0xBF58476D1CE4E5B9ull
#define TMS_FINGERPRINT_MIX_2 0x94D049BB133111EBull

enum {
    TMS_FINGERPRINT_VECTOR_BYTES = 16,
    TMS_FINGERPRINT_CHUNK_BYTES = 512 * 1024, /* the longest contents of one fingerprint */
    TMS_FINGERPRINT_VECTORS = TMS_FINGERPRINT_CHUNK_BYTES / TMS_FINGERPRINT_VECTOR_BYTES,
    TMS_FINGERPRINT_SUMS = 4,
    TMS_FINGERPRINT_WORDS = 4,    /* of the result */
    TMS_FINGERPRINT_GROUP = 4,    /* number of chunks that a block of threads reads together, to load the key once for all */
    TMS_FINGERPRINT_THREADS = 256 /* threads of a block */
};

/* The random key of a process. */
typedef struct tms_fingerprint_key {
    uint32_t vectors[TMS_FINGERPRINT_VECTORS + TMS_FINGERPRINT_SUMS - 1][4];
    uint64_t mix[TMS_FINGERPRINT_WORDS][2 * TMS_FINGERPRINT_SUMS + 1];
} tms_fingerprint_key_t;

/* Contents to compute a fingerprint of. */
typedef struct tms_fingerprint_chunk {
    uint64_t address; /* a multiple of 16 */
    uint64_t bytes;   /* a multiple of 16, at most TMS_FINGERPRINT_CHUNK_BYTES */
} tms_fingerprint_chunk_t;

typedef struct tms_fingerprint {
    uint32_t words[TMS_FINGERPRINT_WORDS];
} tms_fingerprint_t;

#endif
