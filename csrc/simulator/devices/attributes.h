/* Attributes of a device. Called with the simulator's lock held. */
#ifndef TMS_SIM_DEVICES_ATTRIBUTES_H
#define TMS_SIM_DEVICES_ATTRIBUTES_H

/* The value of a CUdevice_attribute; 0 if the device has none. */
int sim_device_value(int attribute, int device);

#endif
