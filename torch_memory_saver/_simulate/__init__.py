"""What a program needs to run on the simulated GPU: an ELF reader and stand-ins for libraries."""
