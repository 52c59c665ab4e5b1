"""``python -m torch_memory_saver``."""

import sys

from torch_memory_saver.cli import main

if __name__ == "__main__":
    sys.exit(main())
