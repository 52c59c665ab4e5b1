/* Hints to the caches of this CPU. Only speed depends on them. Any thread, no state. */
#ifndef TMS_CACHE_H
#define TMS_CACHE_H

#include <stddef.h>

/* Tells the CPU that this thread is done with [data, data + bytes), and that another CPU or the host of this virtual machine
 * writes there next. The lines may then move to the shared cache. The instruction is CLDEMOTE (Intel 64 Architectures
 * Software Developer's Manual, volume 2A), written as bytes because older assemblers do not know it. CPUs without it execute
 * a NOP. */
static inline void tms_cache_demote(const void *data, size_t bytes) {
#if defined(__x86_64__)
    enum { LINE_BYTES = 64 };
    const char *cursor = data;
    for (size_t done = 0; done < bytes; done += LINE_BYTES)
        __asm__ volatile(".byte 0x0f, 0x1c, 0x00" : : "a"(cursor + done));
#else
    (void)data, (void)bytes;
#endif
}

#endif
