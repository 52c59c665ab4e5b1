/* Devices: how many there are, and which numbers name one. Called with the simulator's lock held. The entry points of this
 * folder are in devices/entries.h. */
#ifndef TMS_SIM_DEVICES_DEVICE_H
#define TMS_SIM_DEVICES_DEVICE_H

#include <stdbool.h>

bool sim_device_valid(int device);

#endif
