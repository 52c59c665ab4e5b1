"""What explains a lack of memory and shows the processes of a machine: out-of-memory reports, pages of processes, top."""
