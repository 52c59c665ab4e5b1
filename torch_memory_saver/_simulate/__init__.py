"""What a program needs to run on the simulated GPU: an ELF reader, stub libraries, and PyTorch's operators."""
