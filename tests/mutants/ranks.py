"""Bugs of pauses and resumes on all ranks: the vote, and the opposite call."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_VOTE = "torch_memory_saver/ranks/vote.py"
_MOVES = "torch_memory_saver/ranks/moves.py"
_CALLS = "torch_memory_saver/ranks/__init__.py"
_VOTE_TESTS = "tests/unit/python/ranks/test_vote.py"
_CALLS_TESTS = "tests/unit/python/ranks/test_calls.py"

_VOTES = (
    Mutant(
        "the-last-decision-counts",
        _VOTE,
        'return _failures(self._store.compare_set(self._key("decision"), "", json.dumps(failures)))',
        'self._store.set(self._key("decision"), json.dumps(failures))\n        return failures',
        (f"{_VOTE_TESTS}::test_every_rank_obeys_the_same_decision",),
    ),
    Mutant(
        "a-rank-does-not-read-the-decision",
        _VOTE,
        'return _failures(self._store.get(self._key("decision")))',
        "return {}",
        (f"{_VOTE_TESTS}::test_every_rank_obeys_the_same_decision", _CALLS_TESTS),
    ),
    Mutant(
        "a-late-rank-does-its-part",
        _VOTE,
        'if self._store.check([self._key("decision")]):',
        "if False:",
        (f"{_CALLS_TESTS}::test_a_rank_that_is_too_late_changes_nothing",),
    ),
    Mutant(
        "the-death-of-the-last-rank-undoes-a-call-that-all-agreed-to",
        _VOTE,
        'if self._store.add(self._key("agreed"), 0) == len(self._ranks):',
        "if False:",
        (f"{_VOTE_TESTS}::test_the_last_rank_is_killed_between_its_agreement_and_the_decision",),
    ),
    Mutant(
        "the-keys-of-every-call-stay-in-the-store",
        _VOTE,
        "if not failures and self._number > 1:",
        "if False:",
        (f"{_VOTE_TESTS}::test_every_rank_obeys_the_same_decision",),
    ),
    Mutant(
        "a-store-that-does-not-answer-is-waited-for",
        _VOTE,
        "_thread.start_new_thread(run, ())",
        "run()",
        (f"{_VOTE_TESTS}::test_a_store_that_never_answers_is_lost",),
    ),
    Mutant(
        "an-interrupted-rank-goes-on-as-if-nothing-were",
        _CALLS,
        "        interruption = own.error\n",
        "        pass\n",
        (f"{_CALLS_TESTS}::test_an_interrupted_call_is_undone_on_all_ranks",),
    ),
)

_OPPOSITES = (
    Mutant(
        "memory-that-was-paused-before-is-resumed",
        _MOVES,
        "if row.state == self.after and earlier is not None and earlier.state == self.before:",
        "if row.state == self.after and earlier is not None:",
        (f"{_CALLS_TESTS}::test_what_was_in_the_state_before_stays_there",),
    ),
    Mutant(
        "a-tag-of-which-the-call-moved-a-part-is-undone-as-a-whole",
        _MOVES,
        "if others:",
        "if False:",
        (f"{_CALLS_TESTS}::test_a_tag_of_which_the_call_moved_a_part_is_named",),
    ),
    Mutant(
        "contents-of-one-pause-are-lost-when-its-resume-is-undone",
        _MOVES,
        'backup="host" if any(row.backup == "none" for row in with_contents) else None',
        "backup=None",
        (f"{_CALLS_TESTS}::test_a_resume_is_undone_with_contents",),
    ),
    Mutant(
        "memory-without-contents-gets-a-backup",
        _MOVES,
        'torch_memory_saver.pause(tag, backup="discard")',
        "torch_memory_saver.pause(tag)",
        (f"{_CALLS_TESTS}::test_a_resume_is_undone_with_contents",),
    ),
)

MUTANTS = _VOTES + _OPPOSITES
