"""The folder of the shared store, seen by a process that does not use the store (``docs/architecture-shared-store.md``).

``folder`` finds and opens it, ``contents`` reads it, and ``cleaning`` removes what dead processes have left. Nothing here
makes a folder or a holder, imports torch, or calls the core's store.
"""
