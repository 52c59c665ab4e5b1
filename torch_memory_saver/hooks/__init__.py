"""Old import paths of the hook helpers: see _legacy/compat.py."""
