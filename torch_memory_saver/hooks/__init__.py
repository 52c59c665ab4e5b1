"""Old import paths of the hook helpers: see _compat/cpp_package.py."""
