"""Reports about memory that a device did not have: one for each out-of-memory error that reaches the program.

`reporter` is called with the failure, on the thread that fails, and is started by TMS_DEBUG. `failure` is what failed,
`account` who holds the device's memory and what to do, `content` everything that a report says, `text` the report for
people, `folder` the files.

What holds for all of it, because it runs where memory is short:

- it allocates no device memory, waits for no device, starts no process and no thread, and makes no driver call that
  invalidates a stream capture;
- it has no lock of its own. Of other locks it takes PyTorch's allocator mutex, which PyTorch releases before it calls its
  observers, and short ones of the native core, which no caller holds while Python code runs;
- it raises no Exception. A part that fails is missing in the report, which says why. A file that cannot be written is a
  warning in the log;
- a failure inside of it, on the same thread, is not reported.
"""
