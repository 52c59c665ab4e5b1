"""Old import paths of the hook helpers: see compat.py."""
