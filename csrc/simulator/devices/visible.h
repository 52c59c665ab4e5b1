/* What CUDA_VISIBLE_DEVICES leaves of the machine's devices. An ordinal is the program's number of a device, a place the
 * machine's, on which processes agree. Called with the simulator's lock held, but for the two functions that tell UUIDs. */
#ifndef TMS_SIM_DEVICES_VISIBLE_H
#define TMS_SIM_DEVICES_VISIBLE_H

enum { SIM_FIRST_BUS = 0x10, SIM_UUID_TEXT_BYTES = 41 }; /* PCI; GPU-01234567-89ab-cdef-0123-456789abcdef */

void sim_visible_all(void);  /* of them */
void sim_visible_read(void); /* from the environment */
int sim_visible_place(int ordinal);
int sim_visible_ordinal(int place); /* -1: the program does not see it */
void sim_visible_uuid(int place, unsigned char *uuid);
void sim_visible_uuid_text(int place, char *text);

#endif
