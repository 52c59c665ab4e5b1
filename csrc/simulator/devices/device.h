/* The devices, their ordinals and their attributes. devices/entries.h lists the entry points. Called with the simulator's
 * lock held. */
#ifndef TMS_SIM_DEVICES_DEVICE_H
#define TMS_SIM_DEVICES_DEVICE_H

#include <stdbool.h>

bool sim_device_valid(int device);

/* The value of a CUdevice_attribute; 0 if the device has none. */
int sim_device_value(int attribute, int device);

#endif
