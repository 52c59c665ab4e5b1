"""The private corners of the C++ package that programs use. Nothing else depends on them."""
