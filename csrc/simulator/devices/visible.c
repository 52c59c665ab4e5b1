#include "simulator/devices/visible.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "simulator/base/simulation.h"
#include "simulator/simulator.h"

enum { UUID_BYTES = 16 };

static const char uuid_prefix[] = "GPU-";

int sim_visible_ordinal(int machine_index) {
    for (int ordinal = 0; ordinal < sim_state.device_count; ordinal++) {
        if (sim_state.visible[ordinal] == machine_index) return ordinal;
    }
    return -1;
}

/* Returns a hash of the machine's name (FNV-1a). */
static uint64_t hash_name(const char *name) {
    static const uint64_t basis = 0xCBF29CE484222325U, prime = 0x100000001B3U;
    uint64_t hash = basis;
    for (; *name; name++) hash = (hash ^ (unsigned char)*name) * prime;
    return hash;
}

/* The UUID must be the same in all processes of one machine, and differ on other machines. */
void sim_visible_uuid(int machine_index, unsigned char *uuid) {
    static const char text[UUID_BYTES] = "Simulated GPU", with_name[UUID_BYTES - sizeof(uint64_t)] = "Sim GPU";
    const char *name = secure_getenv("TMS_SIMULATED_SHARED");
    memcpy(uuid, text, sizeof text);
    if (name && *name) {
        uint64_t hash = hash_name(name);
        memcpy(uuid, &hash, sizeof hash);
        memcpy(uuid + sizeof hash, with_name, sizeof with_name);
    }
    uuid[UUID_BYTES - 1] = (unsigned char)machine_index;
}

void sim_visible_uuid_text(int machine_index, char *text) {
    static const bool dash_before[UUID_BYTES] = {[4] = true, [6] = true, [8] = true, [10] = true};
    unsigned char uuid[UUID_BYTES];
    sim_visible_uuid(machine_index, uuid);
    text += sprintf(text, "%s", uuid_prefix);
    for (int i = 0; i < UUID_BYTES; i++) text += sprintf(text, dash_before[i] ? "-%02x" : "%02x", uuid[i]);
}

/* Returns the only device whose UUID has this prefix, or -1. */
static int find_uuid(const char *text, size_t length) {
    int found = -1;
    for (int machine_index = 0; machine_index < sim_state.machine_count; machine_index++) {
        char uuid[SIM_UUID_TEXT_BYTES];
        sim_visible_uuid_text(machine_index, uuid);
        if (length >= sizeof uuid || strncmp(uuid, text, length) != 0) continue;
        if (found >= 0) return -1;
        found = machine_index;
    }
    return found;
}

/* Parses one list entry: a UUID, or a number whose trailing characters are ignored. */
static int find_entry(const char *text, size_t length) {
    enum { DECIMAL = 10 };
    char *end = NULL;
    if (strncmp(text, uuid_prefix, strlen(uuid_prefix)) == 0) return find_uuid(text, length);
    long number = strtol(text, &end, DECIMAL);
    return end > text && end <= text + length && number >= 0 && number < sim_state.machine_count ? (int)number : -1;
}

void sim_visible_all(void) {
    sim_state.device_count = sim_state.machine_count;
    for (int i = 0; i < TMS_SIM_MAX_DEVICES; i++) sim_state.visible[i] = i;
}

/* As in the real driver: an invalid entry ends the list, and a duplicate makes the whole list empty. */
void sim_visible_read(void) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    int count = 0;
    sim_visible_all();
    if (!text) return;
    for (size_t length = strcspn(text, ","); count < TMS_SIM_MAX_DEVICES; length = strcspn(text, ",")) {
        while (length && *text == ' ') text++, length--;
        int machine_index = length ? find_entry(text, length) : -1;
        if (machine_index < 0) break;
        for (int i = 0; i < count; i++) {
            if (sim_state.visible[i] != machine_index) continue;
            sim_state.device_count = 0;
            return;
        }
        sim_state.visible[count++] = machine_index;
        if (text[length] == '\0') break;
        text += length + 1;
    }
    sim_state.device_count = count;
}
