/* What a device says of itself, in numbers. Called with the simulator's lock held. */
#ifndef TMS_SIM_DEVICES_ATTRIBUTES_H
#define TMS_SIM_DEVICES_ATTRIBUTES_H

/* An attribute of a device, by CUdevice_attribute; 0 where it has none. */
int sim_device_value(int attribute, int device);

#endif
