"""Modules of re-exports: names of the C++ package, whose code is in _compat/cpp_package.py."""
