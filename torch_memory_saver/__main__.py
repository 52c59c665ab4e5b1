"""``python -m torch_memory_saver``."""

import sys

if __name__ == "__main__":
    try:
        from torch_memory_saver._cli.main import MODULE, main

        status = main(program=MODULE)
    except KeyboardInterrupt:  # outside a command: during the import, or while output is written
        status = 130
    sys.exit(status)
