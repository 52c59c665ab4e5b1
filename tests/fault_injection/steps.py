"""The calls under test, each with its checks."""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterable
from typing import Any

from blocks import ACTIVE, DAMAGED, DISK, PAUSED, PAUSING, RESUMING, Block
from checks import REFUSALS, CheckedWorld, read_log
from machine import CAPTURE_UNSUPPORTED, OUT_OF_MEMORY
from step import Step

from torch_memory_saver import _core as core

#: The last part of a name that a dead process could have left, its suffixes, and names that are not of such a process.
DEAD = "999999999-0123456789abcdef"
REMAINS = (".lock", "-0.backup", "-17.backup", ".new")
OTHERS = ("notes.txt", "tms-1-0.lock", f"tms-0123456789abcdef-{DEAD}.lock")


#: The name of published objects. Their sizes are whole vectors of the kernel.
PUBLISHED = "model"
VECTOR = 16


def object_bytes(block: Block) -> int:
    return block.size // VECTOR * VECTOR


def pieces_of(blocks: list[Block]) -> bytes:
    """As `publish` takes them."""
    return array(
        "Q", [number for block in blocks for number in (block.address, object_bytes(block), block.device)]
    ).tobytes()


def wait_until(condition: Callable[[], bool]) -> None:
    """Polls, and yields to other threads. The condition must stay true once it is true."""
    while not condition():
        time.sleep(0)


def let_go(failed: Callable[[], bool], ended: threading.Event, go_on: Callable[[], None]) -> None:
    """Releases what is held once something has failed, or the call that was to come first has ended."""
    wait_until(lambda: ended.is_set() or failed())
    go_on()


class Steps(CheckedWorld):
    """The world with the steps that scenarios return."""

    def pause_step(self, tags: Iterable[str] | None = None, **options: Any) -> Step:
        def verify(before: dict[int, int], error: BaseException | None, failed: set[str]) -> list[str]:
            return self.verify_move(self._tags(tags), ACTIVE, PAUSED, before, error, failed)

        return Step(lambda: self.pause(tags, **options), verify)

    def resume_step(self, tags: Iterable[str] | None = None, **options: Any) -> Step:
        def verify(before: dict[int, int], error: BaseException | None, failed: set[str]) -> list[str]:
            return self.verify_move(self._tags(tags), PAUSED, ACTIVE, before, error, failed)

        step = Step(lambda: self.resume(tags, **options), verify, halves=True)
        if options.get("timeout"):
            step.waits_for.add(OUT_OF_MEMORY)
        return step

    def checked_resume_step(self, tags: Iterable[str] | None = None) -> Step:
        """A resume that runs a kernel on what it has restored. Any failure may leave the device busy."""

        def verify(before: dict[int, int], error: BaseException | None, failed: set[str]) -> list[str]:
            return self.verify_move(self._tags(tags), PAUSED, ACTIVE, before, error, failed, REFUSALS | failed)

        return Step(lambda: self.resume(tags), verify, halves=True)

    def pending_step(self, tags: Iterable[str] | None = None, stream: bool = False, **options: Any) -> Step:
        """A resume in the background. `stream`: one of the program's waits for its contents, before any copy is done."""

        def run() -> None:
            pending: list[Any] = []
            refused: list[BaseException] = []
            step.keeps = False
            self.note_filler(tags, options.get("zero", False))
            fired, ended = self.machine.fired(), threading.Event()
            go_on = self.hold_copies() if stream else lambda: None
            # A failure before all copies are queued must wait for those that are.
            letting_go = threading.Thread(target=let_go, args=(lambda: self.machine.fired() > fired, ended, go_on))
            letting_go.start()
            try:
                pending.append(core.resume_begin(self._tags(tags), None, **options))
                try:
                    if stream:
                        core.pending_wait_stream(pending[0], 0)
                except Exception as error:
                    refused.append(error)
                ended.set()
                core.pending_wait(pending[0])
                if refused:
                    step.keeps = True  # it is about the stream, and the resume keeps what it has done
                    raise refused.pop()
            finally:
                ended.set()
                letting_go.join()
                pending.clear()  # what is raised refers to this frame
                refused.clear()

        def verify(before: dict[int, int], error: BaseException | None, failed: set[str]) -> list[str]:
            if step.keeps:
                error = None
            # Kernels of the program may use memory that a failed copy was to restore.
            allowed = REFUSALS | failed if stream else REFUSALS
            return self.verify_move(self._tags(tags), PAUSED, ACTIVE, before, error, failed, allowed)

        step = Step(run, verify, halves=True)
        return step

    def publish_step(self, blocks: list[Block]) -> Step:
        """Gives the objects of blocks a name. After a failure there is none."""

        def run() -> None:
            core.publish(pieces_of(blocks), PUBLISHED, "{}", None)

        def expect(error: BaseException | None) -> list[str]:
            self.sweep_publications()
            manifest = self.published(PUBLISHED)
            return [] if (manifest is None) == (error is not None) else [f"published, with {error}: {manifest}"]

        step = self.other_step(run, expect)
        step.finish = lambda: self.withdraw(PUBLISHED)
        return step

    def sweep_publications(self) -> None:
        """A directory that a failed publication could not remove goes with the next call."""
        if any("/publishing-" in name for name in self.shared_files()):
            self.reclaim()

    def adopt_step(self, blocks: list[Block]) -> Step:
        """Fills blocks with their published contents, after they got others. A failure leaves each block with the former
        contents or with all of the published ones: nothing reaches a block that was not checked."""
        self.publish_step(blocks).run()
        self.end_links()
        names = "".join(self.published(PUBLISHED) or ())
        wanted = {block.address: block.data[: object_bytes(block)] for block in blocks}
        self.rewrite(*blocks)

        def run() -> None:
            missing = core.adopt(pieces_of(blocks), names, None)
            assert missing is None, f"the object {missing} is missing"

        def expect(error: BaseException | None) -> list[str]:
            if error is not None:
                self.reclaim()  # copies that the call could not wait for have ended then, and scratch memory is released
                self.machine.settle()
            for block in blocks:
                size = object_bytes(block)
                if error is None or self.machine.holds(block.address, wanted[block.address]):
                    block.data = wanted[block.address] + block.data[size:]
            return []  # the contents of all blocks are checked after each call

        step = self.other_step(run, expect)
        step.finish = lambda: self.withdraw(PUBLISHED)
        return step

    def dropped_step(self, tags: Iterable[str] | None = None) -> Step:
        """A resume in the background whose end no caller waits for. Failures are logged."""

        def run() -> None:
            core.resume_begin(self._tags(tags), None)

        def verify(before: dict[int, int], error: BaseException | None, failed: set[str]) -> list[str]:
            after = self.states()
            states = {after[block.address] for block in self._chosen(tags)}
            if len(states) == 1 and (ACTIVE in states or (PAUSED in states and failed)):
                return []
            return [] if DAMAGED in states and failed & REFUSALS else [f"a resume without a waiter left {states}"]

        return Step(run, verify, retry=lambda: self.resume(tags), keeps=True, logs_its_end=True)

    @staticmethod
    def repairing(step: Step) -> Step:
        """It also retries damaged blocks, and defers that while a graph is captured."""
        step.waits_for.add(CAPTURE_UNSUPPORTED)
        return step

    def free_step(self, blocks: list[Block], call: Callable[[], None] | None = None) -> Step:
        """Frees never fail: refused memory is quarantined."""

        def run() -> None:
            for block in blocks:
                self.free(block)
            if call:
                call()

        def verify(before: dict[int, int], error: BaseException | None, failed: set[str]) -> list[str]:
            problems = [] if error is None else [f"a free failed: {error}"]
            after = self.states()
            gone = {block.address for block in blocks}
            if set(after) != set(before) - gone:
                problems.append("other allocations than the freed ones are gone, or a freed one is still there")
            return problems + self.unchanged(before, after, set())

        return Step(run, verify, retry=self.reclaim, waits_for={CAPTURE_UNSUPPORTED})

    def allocate_step(self, allocate: Callable[[], Block], out_of_memory: bool = False) -> Step:
        """`out_of_memory`: the driver has none left, or memory awaits release."""

        def verify(before: dict[int, int], error: BaseException | None, failed: set[str]) -> list[str]:
            after = self.states()
            added = set(after) - set(before)
            problems = self.unchanged(before, after, set())
            if len(added) != (0 if error else 1) or not set(before) <= set(after):
                problems.append(
                    f"{len(added)} allocations more after an allocation that {'failed' if error else 'succeeded'}"
                )
            if any(after[address] != ACTIVE for address in added):
                problems.append("what was allocated is not ACTIVE")
            return problems

        step = Step(lambda: [allocate()].clear(), verify)
        if out_of_memory:
            step.causes.add(("cuMemCreate", OUT_OF_MEMORY))
            step.waits_for.add(OUT_OF_MEMORY)  # memory awaiting release is released, and the call retried
        return step

    def other_step(self, run: Callable[[], None], expect: Callable[[BaseException | None], list[str]] | None = None) -> Step:
        """A call that changes no state of any allocation."""

        def verify(before: dict[int, int], error: BaseException | None, failed: set[str]) -> list[str]:
            after = self.states()
            problems = [] if set(after) == set(before) else ["allocations came or went"]
            return problems + self.unchanged(before, after, set()) + (expect(error) if expect else [])

        return Step(run, verify)

    def reserve(self, size: int) -> None:
        """Host memory is available for later backups once this has returned."""
        self.pools = True
        core.reserve_host_memory(size, 0)
        self.machine.settle()

    def reserve_step(self, size: int) -> Step:
        """Failures in the background are logged; a part may then be available."""
        self.pools = True

        def expect(error: BaseException | None) -> list[str]:
            counters = core.counters()
            if error is not None or counters["host_pooled_bytes"] >= size:
                return []
            log = read_log()
            return [] if "prepared before this failure stays" in log else [f"missing memory is not reported: {counters}"]

        return self.other_step(lambda: core.reserve_host_memory(size, 0), expect)

    def free_in_transition(
        self,
        block: Block,
        move: Callable[[], None],
        held: Callable[[], Callable[[], None]],
        damaging: Collection[str] = frozenset(REFUSALS),
    ) -> Step:
        """`move` on a second thread, and a free of `block` while `move` owns it. `held` makes the move wait, and returns
        what resumes it. `damaging`: the failures that allow DAMAGED."""
        others = [other for other in self.blocks.values() if other is not block]
        result: list[BaseException | None] = []

        def target() -> None:
            try:
                move()
                result.append(None)
            except BaseException as error:
                result.append(error)

        def run() -> None:
            result.clear()
            freeable = block.address in self.blocks
            go_on = held() if freeable else None
            thread = threading.Thread(target=target)
            thread.start()
            if go_on:
                wait_until(lambda: bool(result) or self.state(block) in (PAUSING, RESUMING))
                # A move that failed at once has not begun, or is undone: then the next attempt frees it. One that fails at
                # this moment leaves a free that waits for the device, so the device must not wait for the free.
                if not result:
                    freeing = threading.Thread(target=self.free, args=(block,))
                    freeing.start()
                    wait_until(lambda: bool(result) or not freeing.is_alive())
                    go_on()
                    freeing.join()
                else:
                    go_on()
            thread.join()
            if result[0] is not None:
                raise result[0]

        def verify(before: dict[int, int], error: BaseException | None, failed: set[str]) -> list[str]:
            after = self.states()
            problems = []
            if block.address in after and block.address not in self.blocks:
                problems.append("an allocation freed in transition is still there")
            states = {after.get(other.address) for other in others}
            if len(states - {DAMAGED}) > 1:
                problems.append(f"part of them moved: {states}")
            if DAMAGED in states and not failed & set(damaging):
                problems.append("DAMAGED without a refusal of the driver")
            return problems

        return Step(run, verify, keeps=True, waits_for={CAPTURE_UNSUPPORTED}, halves=True)

    def allocate_outside(self, size: int, tag: str) -> Block:
        """Outside any region."""
        return self.adopt(core.allocate(size, 0), size, 0, self.name_of(tag), 0)

    def lock_domain(self) -> str:
        """As in the names of this process's backup files."""
        probe = self.allocate(1000, DISK, "probe")
        self.pause(("probe",))
        backup = next(self.backup_directory.glob(f"tms-*-{os.getpid()}-*.backup"))
        self.free(probe)
        return backup.name.split("-")[1]

    def directory_step(self, remains: bool) -> Step:
        """Another directory for backup files, which does not exist, or holds files of a dead process."""
        former, wanted = self.backup_directory, self.new_directory()
        dead = f"tms-{self.lock_domain()}-{DEAD}"
        remaining = {dead + end for end in REMAINS}
        others = {*OTHERS, f"{dead}-0.backup.kept"}
        if remains:
            wanted.mkdir()
            for name in remaining | others:
                (wanted / name).write_text(name)
            os.utime(wanted / f"{dead}.new", (0, 0))  # a new one may be about to be locked
            (wanted / f"{dead}-1.backup").symlink_to(wanted / "notes.txt")

        def run() -> None:
            self.set_directory(wanted)

        def verify(before: dict[int, int], error: BaseException | None, failed: set[str]) -> list[str]:
            problems = [] if self.states() == before else ["allocations changed"]
            # The next pause uses the directory that is in force.
            files = set(self.directory.rglob("*.backup"))
            probe = self.allocate(1000, DISK, "probe")
            self.pause(("probe",))
            made = {path.parent for path in set(self.directory.rglob("*.backup")) - files}
            self.free(probe)
            if made != {former if error else wanted}:
                problems.append(f"the directory in force is {made}")
            left = sorted(path.name for path in wanted.iterdir()) if wanted.exists() else []
            if remains and not others <= set(left):
                problems.append(f"another process's files are gone: {left}")
            if remains and not error and not failed and remaining & set(left):
                problems.append(f"a dead process's files are still there: {left}")
            return problems

        def finish() -> None:
            self.remove_directory(wanted, (*remaining, *others, f"{dead}-1.backup"))

        return Step(run, verify, finish=finish)
