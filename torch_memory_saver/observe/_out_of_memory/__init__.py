"""Reports about memory that a device did not have: one for each out-of-memory error that reaches the program.

`reporter` is called with the failure, on the thread that fails, and is started by TMS_DEBUG. `failure` describes the failed
operation, `account` determines who holds the device's memory and what to do, `content` collects everything that a report
says, `text` formats the report for people, and `folder` writes the files.

The following rules apply to the whole package, because it runs when memory is short:

- it allocates no device memory, waits for no device, starts no process and no thread, and makes no driver call that
  invalidates a stream capture;
- it has no lock of its own. It takes PyTorch's allocator mutex, which PyTorch releases before it calls its observers, and
  short locks of the native core, which no caller holds while Python code runs;
- it raises no Exception. A part that fails is missing in the report, and the report gives the reason. A file that cannot be
  written causes a warning in the log;
- a failure inside of it, on the same thread, is not reported.
"""
