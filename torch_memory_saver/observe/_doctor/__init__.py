"""The command `doctor`: checks of the installation, the GPUs and the machine. A new check is a function in the `*_checks` of
its group and its row in that file's `CHECKS`."""
