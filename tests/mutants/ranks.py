"""Bugs of pauses and resumes on all ranks: the vote, and the opposite call."""

from __future__ import annotations

from mutant import Mutant

__all__ = ["MUTANTS"]

_VOTE = "torch_memory_saver/ranks/vote.py"
_MOVES = "torch_memory_saver/ranks/moves.py"
_CALLS = "torch_memory_saver/ranks/__init__.py"
_VOTE_TESTS = "tests/unit/python/ranks/test_vote.py"
_CALLS_TESTS = "tests/unit/python/ranks/test_calls.py"

_ROOM_TESTS = "tests/unit/python/ranks/test_room.py"
_CHECK = "csrc/core/transition/pause.c"
_CHECK_TESTS = "tests/unit/core/transition/test_check_pause.c"

_DECISIONS = f"{_VOTE_TESTS}::test_every_rank_obeys_the_same_decisions"

_VOTES = (
    Mutant(
        "the-last-decision-counts",
        _VOTE,
        'return self._decision(self._store.compare_set(self._key(name), "", decision))',
        "self._store.set(self._key(name), decision)\n        return self._decision(decision.encode())",
        (_DECISIONS,),
    ),
    Mutant(
        "a-rank-does-not-read-the-decision",
        _VOTE,
        "return self._decision(self._store.get(self._key(name)))",
        "return Decision(self.number, {}, ())",
        (_DECISIONS,),
    ),
    Mutant(
        "a-call-joins-one-that-is-decided",
        _VOTE,
        "while self._store.check([self._key(_AGREEMENT)]):",
        "while False:",
        (f"{_VOTE_TESTS}::test_the_call_after_a_missed_one_works",),
    ),
    Mutant(
        "a-rank-that-has-lost-the-store-votes-twice",
        _VOTE,
        "        self._position.number = self.number\n",
        "",
        (f"{_VOTE_TESTS}::test_a_rank_that_has_lost_the_store_does_not_vote_twice",),
    ),
    Mutant(
        "a-refusal-is-not-counted",
        _VOTE,
        'if name == _AGREEMENT and self._store.add(self._key(f"{name}/refusals"), 0):',
        "if False:",
        (f"{_VOTE_TESTS}::test_a_rank_that_comes_after_a_refusal_learns_the_reason",),
    ),
    Mutant(
        "the-death-of-the-last-rank-undoes-a-call-that-all-agreed-to",
        _VOTE,
        "if self._count(name, 0):",
        "if False:",
        (f"{_VOTE_TESTS}::test_the_last_rank_is_killed_between_its_vote_and_the_decision",),
    ),
    Mutant(
        "the-keys-of-every-call-stay-in-the-store",
        _VOTE,
        "            self._delete_earlier()\n",
        "",
        (_DECISIONS,),
    ),
    Mutant(
        "the-last-rank-deletes-the-outcome-that-others-have-not-read",
        _VOTE,
        "        number = self.number - 1\n",
        "        number = self.number\n",
        (f"{_VOTE_TESTS}::test_a_slow_rank_reads_the_outcome_after_the_last_one_has_left_the_call",),
    ),
    Mutant(
        "ranks-go-on-without-one-that-has-not-counted",
        _VOTE,
        "self._failures(name) or {self._rank: lost}",
        "self._failures(name)",
        (f"{_VOTE_TESTS}::test_a_rank_that_is_killed_between_its_vote_and_its_count_does_not_count",),
    ),
    Mutant(
        "a-rank-that-went-on-counts-as-one-of-the-call",
        _VOTE,
        "        if joined.number > self.number:\n",
        "        if joined.number > self.number + 1:\n",
        (f"{_VOTE_TESTS}::test_a_rank_that_has_lost_the_store_does_not_vote_twice",),
    ),
    Mutant(
        "a-short-timeout-leaves-the-store-no-time-for-an-answer",
        _VOTE,
        "min(max(_MIN_ANSWER_S, remaining), _MAX_ANSWER_S)",
        "min(remaining, _MAX_ANSWER_S)",
        (f"{_VOTE_TESTS}::test_a_store_has_a_second_for_an_answer_however_short_the_timeout_is",),
    ),
    Mutant(
        "an-interrupted-rank-waits-for-the-others",
        _VOTE,
        " or (name == _AGREEMENT and self._interruption() is not None)",
        "",
        (f"{_VOTE_TESTS}::test_an_interrupted_rank_decides_against_the_call_at_once",),
    ),
    Mutant(
        "a-store-that-does-not-answer-is-waited-for",
        _VOTE,
        "_thread.start_new_thread(function, ())",
        "function()",
        (f"{_VOTE_TESTS}::test_a_store_that_never_answers_is_lost",),
    ),
    Mutant(
        "ranks-pause-before-all-have-agreed",
        _CALLS,
        "        decision = self._calls.ask(lambda: self._ballot.agree(refusal))\n",
        "        self._perform()\n        decision = self._calls.ask(lambda: self._ballot.agree(refusal))\n",
        (f"{_CALLS_TESTS}::test_nothing_is_paused_before_all_ranks_have_agreed",),
    ),
    Mutant(
        "nothing-is-checked-before-the-ranks-agree",
        _MOVES,
        "        check_pause(",
        "        (",
        (f"{_CALLS_TESTS}::test_a_thread_in_a_region_is_found_before_the_ranks_agree",),
    ),
    Mutant(
        "an-interrupted-rank-goes-on-as-if-nothing-were",
        _CALLS,
        "            interruption = self._error\n",
        "            pass\n",
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
        "a-signal-ends-the-undoing",
        _MOVES,
        "_core.within(undoing, lambda: None)",
        "undoing._end()",
        (f"{_CALLS_TESTS}::test_signals_do_not_end_the_undoing",),
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

_ROOM = (
    Mutant(
        "no-room-is-looked-for-before-the-ranks-agree",
        "torch_memory_saver/_engine/preparation.py",
        "        _core.check_pause(options.tags, current_stream(torch), **core_arguments(torch, options))\n",
        "        pass\n",
        (_ROOM_TESTS, f"{_ROOM_TESTS}::test_a_lack_of_host_memory_fails_the_call_before_any_rank_does_its_part"),
    ),
    Mutant(
        "a-callback-that-makes-room-is-not-waited-for",
        "torch_memory_saver/_engine/preparation.py",
        '    if hook_calls.has_before_callback("pause", options.tags):',
        "    if False:",
        (f"{_ROOM_TESTS}::test_a_callback_before_the_pause_may_make_room",),
    ),
    Mutant(
        "an-after-callback-counts-as-one-that-makes-room",
        "torch_memory_saver/_engine/calls/hook_calls.py",
        "        return any(matched.hook.has_before for matched in self._hooks)",
        "        return bool(self._hooks)",
        (f"{_ROOM_TESTS}::test_a_callback_before_the_pause_may_make_room",),
    ),
    Mutant(
        "a-check-keeps-the-room-that-it-has-found",
        _CHECK,
        "    cancel(t);\n    tms_completion_finish(t, false);",
        "    tms_completion_finish(t, false);",
        (_CHECK_TESTS,),
    ),
    Mutant(
        "a-check-forgets-the-limits-of-host-memory",
        _CHECK,
        "    if (status == TMS_OK) status = tms_backup_batch_check_room(",
        "    if (false) status = tms_backup_batch_check_room(",
        (_CHECK_TESTS,),
    ),
    Mutant(
        "a-check-wants-room-for-what-is-not-live",
        _CHECK,
        "plan_all(t, &pass, known, &copying, error)",
        "plan_all(t, &pass, NULL, &copying, error)",
        (_CHECK_TESTS,),
    ),
    Mutant(
        "a-check-counts-as-a-pause",
        _CHECK,
        ".act = plan_and_cancel};",
        ".act = plan_and_cancel, .calls = &saver->stats.pauses};",
        (_CHECK_TESTS,),
    ),
)

MUTANTS = _VOTES + _OPPOSITES + _ROOM
