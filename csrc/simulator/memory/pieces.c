/* Pieces of a device's memfd, which back physical memory.
 *
 * Some returned pieces stay in a cache, because the system takes much longer to allocate and clear pages than poisoning
 * them again. A piece with few pages keeps them; the cache holds at most kept_bytes in total. Any other piece returns its
 * pages to the system (a punched hole), and its offsets are never reused. In both cases the next owner of a piece finds
 * poison or zeros, never an earlier owner's data. */
#include "simulator/memory/pieces.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "simulator/base/state.h"
#include "simulator/simulator.h"

static const uint64_t kept_bytes = (uint64_t)64 << 20; /* cached free pages per device */

static bool poison_range(int file, off_t offset, uint64_t bytes) {
    enum { BUFFER_BYTES = 1 << 16 };
    char buffer[BUFFER_BYTES];
    memset(buffer, TMS_SIM_POISON, sizeof buffer);
    for (uint64_t done = 0; done < bytes;) {
        uint64_t part = bytes - done < sizeof buffer ? bytes - done : sizeof buffer;
        ssize_t written = pwrite(file, buffer, part, offset + (off_t)done);
        if (written < 0 && errno != EINTR) return false;
        if (written > 0) done += (uint64_t)written;
    }
    return true;
}

/* Calls `visit` for each extent of a range that has pages. False as soon as `visit` returns false. A NULL `visit` only
 * counts bytes. */
static bool visit_pages(int file, off_t start, uint64_t bytes, bool (*visit)(int, off_t, uint64_t), uint64_t *count) {
    off_t end = start + (off_t)bytes, next = 0;
    *count = 0;
    for (off_t at = lseek(file, start, SEEK_DATA); at >= 0 && at < end; at = lseek(file, next, SEEK_DATA)) {
        next = lseek(file, at, SEEK_HOLE);
        if (next < 0 || next > end) next = end;
        *count += (uint64_t)(next - at);
        if (visit && !visit(file, at, (uint64_t)(next - at))) return false;
        if (next == end) break;
    }
    return true;
}

/* Whether a piece is poisoned entirely, and therefore has all its pages. */
static bool is_filled(uint64_t bytes) { return bytes <= sim_state.poison_limit || bytes <= 2 * (uint64_t)SIM_CHUNK_BYTES; }

static bool poison(int file, off_t offset, uint64_t bytes) {
    uint64_t pages = 0, edge = SIM_CHUNK_BYTES;
    if (is_filled(bytes)) return poison_range(file, offset, bytes);
    return visit_pages(file, offset + (off_t)edge, bytes - 2 * edge, poison_range, &pages) &&
           poison_range(file, offset, edge) && poison_range(file, offset + (off_t)(bytes - edge), edge);
}

static void punch_hole(int file, off_t offset, uint64_t bytes) {
    fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, (off_t)bytes);
}

static void remove_kept(sim_device_t *device, unsigned index) {
    device->kept_pages -= device->kept[index].pages;
    device->kept_count--;
    memmove(&device->kept[index], &device->kept[index + 1], (device->kept_count - index) * sizeof device->kept[0]);
}

/* Takes the most recently cached piece of this size: its pages are the likeliest to be in the processor's cache. */
static bool take_kept(sim_device_t *device, uint64_t bytes, off_t *offset) {
    for (unsigned i = device->kept_count; i-- > 0;) {
        if (device->kept[i].bytes != bytes) continue;
        *offset = device->kept[i].offset;
        remove_kept(device, i);
        return true;
    }
    return false;
}

bool sim_piece_take(sim_device_t *device, uint64_t bytes, off_t *offset) {
    off_t found = device->end;
    if (device->memory < 0) device->memory = memfd_create("simulated GPU", MFD_CLOEXEC);
    if (device->memory < 0) return false;
    if (!take_kept(device, bytes, &found)) {
        if (ftruncate(device->memory, found + (off_t)bytes) != 0) return false;
        device->end = found + (off_t)bytes;
    }
    if (!poison(device->memory, found, bytes)) {
        sim_piece_put(device, found, bytes, false);
        return false;
    }
    *offset = found;
    return true;
}

void sim_piece_put(sim_device_t *device, off_t offset, uint64_t bytes, bool keep) {
    uint64_t pages = bytes, limit = sim_state.poison_limit < kept_bytes ? sim_state.poison_limit : kept_bytes;
    /* Only pieces that are partly poisoned need the count. Seeking the end of an extent scans the extents of later
     * pieces, which is too slow for many small ones. */
    if (keep && !is_filled(bytes)) visit_pages(device->memory, offset, bytes, NULL, &pages);
    if (!keep || pages > limit) {
        punch_hole(device->memory, offset, bytes);
        return;
    }
    while (device->kept_count == SIM_KEPT_PIECES || device->kept_pages + pages > kept_bytes) {
        punch_hole(device->memory, device->kept[0].offset, device->kept[0].bytes);
        remove_kept(device, 0);
    }
    device->kept[device->kept_count++] = (sim_piece_t){.offset = offset, .bytes = bytes, .pages = pages};
    device->kept_pages += pages;
}

void sim_piece_clear(sim_device_t *device) {
    if (device->memory >= 0) close(device->memory);
    device->memory = -1;
    device->end = 0;
    device->kept_count = 0;
    device->kept_pages = 0;
}
