"""The private interfaces of the C++ package that programs use. Nothing else depends on them."""
