/* The devices and their ordinals. devices/entries.h lists the entry points. Called with the simulator's lock held. */
#ifndef TMS_SIM_DEVICES_DEVICE_H
#define TMS_SIM_DEVICES_DEVICE_H

#include <stdbool.h>

bool sim_device_valid(int device);

#endif
