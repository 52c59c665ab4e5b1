/* The effect of CUDA_VISIBLE_DEVICES. An ordinal numbers the devices that the program sees. A machine index numbers the
 * devices of the machine and is the same in all processes. Called with the simulator's lock held; the two UUID functions
 * need no lock. */
#ifndef TMS_SIM_DEVICES_VISIBLE_H
#define TMS_SIM_DEVICES_VISIBLE_H

enum {
    SIM_FIRST_BUS = 0x10,     /* first PCI bus number */
    SIM_UUID_TEXT_BYTES = 41, /* GPU-01234567-89ab-cdef-0123-456789abcdef */
};

void sim_visible_all(void);                 /* makes all devices visible */
void sim_visible_read(void);                /* reads CUDA_VISIBLE_DEVICES */
int sim_visible_ordinal(int machine_index); /* -1: not visible */
void sim_visible_uuid(int machine_index, unsigned char *uuid);
void sim_visible_uuid_text(int machine_index, char *text);

#endif
