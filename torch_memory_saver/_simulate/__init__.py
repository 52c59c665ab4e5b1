"""The parts that run a program on the simulated GPU: an ELF reader, stub libraries, and PyTorch's operators."""
