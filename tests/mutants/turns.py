"""Bugs in the order in which processes get the locks of devices."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_LOCK, _QUEUE = "csrc/device/device_lock.c", "csrc/device/device_queue.c"
_TESTS = ("tests/unit/device/test_device_queue.c",)

MUTANTS = (
    Mutant(
        "who-waits-tries-without-looking-who-comes-first",
        _LOCK,
        "    bool done = (!missing || tms_device_queue_poll(",
        "    bool done = (!missing || ticket->name[0] || tms_device_queue_poll(",
        _TESTS,
    ),
    Mutant(
        "a-new-request-passes-those-who-wait",
        _LOCK,
        "    bool done = (!missing || tms_device_queue_poll(",
        "    bool done = (!missing || !ticket->name[0] || tms_device_queue_poll(",
        _TESTS,
    ),
    Mutant(
        "a-holder-waits-for-who-waits-for-it",
        _QUEUE,
        "        if (devices->device[i].held) return i;\n",
        "",
        _TESTS,
    ),
    Mutant(
        "a-request-for-several-devices-has-a-place-at-one",
        _QUEUE,
        "        if (devices->device[i].wanted)\n",
        "        if (devices->device[i].wanted && !devices->device[(i + 1) % TMS_MAX_DEVICES].wanted)\n",
        _TESTS,
    ),
    Mutant(
        "a-ticket-that-was-removed-is-not-made-again",
        _QUEUE,
        "    return current || make_file(directory, devices, ticket, failure);",
        "    return true;",
        _TESTS,
    ),
    Mutant(
        "who-leaves-keeps-the-ticket",
        _QUEUE,
        "    if (fd >= 0) (void)unlinkat(fd, ticket->name, 0);\n",
        "",
        _TESTS,
    ),
    Mutant(
        "a-ticket-of-a-dead-process-counts",
        _QUEUE,
        "    if (os_error == 0)\n        (void)unlinkat(directory, name, 0);",
        "    if (os_error == EEXIST)\n        (void)unlinkat(directory, name, 0);",
        _TESTS,
    ),
    Mutant(
        "who-is-stopped-keeps-all-waiting",
        _QUEUE,
        "    if (ticket->polls < queue->patience) return;\n",
        "    if (ticket->polls < queue->patience || front->name[0]) return;\n",
        _TESTS,
    ),
    Mutant(
        "a-forked-child-keeps-the-place-of-its-parent",
        _QUEUE,
        "        close_ticket(ticket);\n        ticket->name[0] = '\\0';\n    }\n    queue->waiting = NULL;",
        "        ticket->name[0] = '\\0';\n    }\n    queue->waiting = NULL;",
        _TESTS,
    ),
)
