"""The lead's book: one decision per step for all ranks, and nothing overwritten that is needed."""

from __future__ import annotations

from easyckpt.saver.ledger import (
    BACKOFF_MAX_S,
    COPY_TIMEOUT_S,
    STAGE_TIMEOUT_S,
    Ledger,
    PersistPolicy,
    Stage,
)
from easyckpt.saver.protocol import Key


def ledger(*, world: int = 2, replicas: bool = False, policy: PersistPolicy | None = None) -> Ledger:
    return Ledger(generation=3, world_size=world, replicas=replicas, policy=policy or PersistPolicy())


def granted(book: Ledger, rank: int, step: int, now: float = 0.0) -> bool:
    answer, _ = book.ask(rank, step, now=now)
    assert answer is not None
    return answer.granted


def complete(book: Ledger, step: int, *, world: int = 2) -> None:
    for rank in range(world):
        assert granted(book, rank, step)
    for rank in range(world):
        book.sealed(rank, step)


def test_a_step_is_in_memory_when_every_rank_has_sealed() -> None:
    book = ledger()
    assert granted(book, 0, 1)
    assert granted(book, 1, 1)
    assert book.sealed(0, 1) == ()
    assert book.complete is None
    (change,) = book.sealed(1, 1)
    assert (change.step, change.stage) == (1, Stage.MEMORY)
    assert book.complete == 1
    assert book.protected == (Key(3, 1),)


def test_one_step_at_a_time_and_a_skip_holds_for_all_ranks() -> None:
    book = ledger()
    assert granted(book, 0, 1)
    answer, _ = book.ask(0, 2, now=0.0)
    assert answer is not None
    assert not answer.granted
    assert "1 is in flight" in answer.reason
    assert granted(book, 1, 1)
    for rank in (0, 1):
        book.sealed(rank, 1)
    late, _ = book.ask(1, 2, now=0.0)
    assert late == answer
    assert book.skipped == 1


def test_who_blocks_is_answered_when_the_slot_is_free() -> None:
    book = ledger(world=1)
    assert granted(book, 0, 1)
    assert book.ask(0, 2, now=0.0, block=True) == (None, ())
    book.sealed(0, 1)
    answer, _ = book.ask(0, 2, now=0.0, block=True)
    assert answer is not None
    assert answer.granted


def test_with_replicas_a_step_stays_in_flight_until_it_is_copied() -> None:
    book = ledger(replicas=True)
    complete(book, 1)
    assert not granted(book, 0, 2)
    assert book.replicated_by(0, 1) == ()
    (change,) = book.replicated_by(1, 1)
    assert change.stage is Stage.REPLICATED
    assert book.replicated == 1
    assert granted(book, 0, 3)


def test_a_copy_that_fails_frees_the_slots_and_shows() -> None:
    book = ledger(replicas=True)
    complete(book, 1)
    book.replicated_by(0, 1, "unreachable")
    assert book.replicated_by(1, 1) == ()
    assert book.replicated is None
    assert "unreachable" in book.trouble(0.0)
    complete(book, 2)
    book.replicated_by(0, 2)
    book.replicated_by(1, 2)
    assert book.trouble(0.0) == ""


def test_a_step_being_persisted_is_protected_and_holds_up_the_next_but_one() -> None:
    book = ledger(world=1)
    complete(book, 1, world=1)
    assert book.next_persist(0.0) == 1
    complete(book, 2, world=1)
    assert book.protected == (Key(3, 1), Key(3, 2))
    answer, _ = book.ask(0, 3, now=0.0)
    assert answer is not None
    assert not answer.granted
    assert "being written to storage" in answer.reason
    (change,) = book.persisted(1, error="", now=1.0)
    assert change.stage is Stage.DURABLE
    assert granted(book, 0, 4)


def test_trouble_with_storage_is_retried_with_growing_pauses_and_forgotten_when_over() -> None:
    book = ledger(world=1)
    complete(book, 1, world=1)
    now = 0.0
    pauses = []
    for _ in range(10):
        assert book.next_persist(now) == 1
        book.persisted(1, error="503", now=now)
        assert book.trouble(now).startswith("503; no step is durable, and none was added for")
        step = 0.0
        while book.next_persist(now + step) is None:
            step += 0.5
        pauses.append(step)
        book.persisting = None
        now += step
    assert pauses == sorted(pauses)
    assert pauses[-1] == BACKOFF_MAX_S
    assert book.next_persist(now) == 1
    book.persisted(1, error="", now=now)
    assert book.trouble(0.0) == ""
    assert book.durable == 1
    assert book.is_settled


def test_a_rank_that_never_seals_makes_the_step_abandoned_by_name() -> None:
    book = ledger(world=3)
    for rank in (0, 1, 2):
        assert granted(book, rank, 1)
    book.sealed(1, 1)
    assert book.expire(STAGE_TIMEOUT_S - 1) == ()
    (change,) = book.expire(STAGE_TIMEOUT_S)
    assert change.stage is Stage.ABANDONED
    assert "ranks 0, 2" in change.reason
    assert granted(book, 0, 2, now=STAGE_TIMEOUT_S)


def test_a_report_of_a_peer_copy_that_never_comes_does_not_stop_saves_for_good() -> None:
    book = ledger(replicas=True)
    complete(book, 1)
    book.replicated_by(0, 1)
    end = STAGE_TIMEOUT_S + COPY_TIMEOUT_S
    assert book.expire(end - 1) == ()
    assert not granted(book, 0, 2, now=end - 1)
    assert book.expire(end) == ()
    assert granted(book, 0, 3, now=end)
    assert "ranks 1" in book.trouble(0.0)


def test_a_failed_copy_abandons_the_step_for_all_and_harms_no_older_one() -> None:
    book = ledger()
    complete(book, 1)
    assert granted(book, 0, 2)
    (change,) = book.failed(0, 2, reason="no memory", now=0.0)
    assert change.stage is Stage.ABANDONED
    assert not granted(book, 1, 2)
    assert book.complete == 1
    assert granted(book, 0, 3)


def test_a_failure_before_anybody_asked_keeps_the_others_from_beginning() -> None:
    book = ledger()
    (change,) = book.failed(1, 5, reason="the lead was away", now=0.0)
    assert change.stage is Stage.ABANDONED
    assert not granted(book, 0, 5)
    assert granted(book, 0, 6)


def test_a_rank_that_went_on_without_the_step_in_flight_ends_it() -> None:
    book = ledger()
    assert granted(book, 1, 5)
    answer, (change,) = book.ask(0, 6, now=0.0)
    assert change.stage is Stage.ABANDONED
    assert "rank 0 went on" in change.reason
    assert answer is not None
    assert answer.granted
    assert granted(book, 1, 6)


def test_a_step_that_waits_for_a_rank_that_is_gone_is_given_up() -> None:
    book = ledger()
    assert granted(book, 0, 5)
    book.sealed(0, 5)
    assert book.gone((0,)) == ()  # it has saved it
    (change,) = book.gone((0, 1))
    assert (change.step, change.stage) == (5, Stage.ABANDONED)
    assert book.gone((0, 1)) == ()
    assert granted(book, 0, 6)
    assert granted(book, 1, 6)
    assert book.gone((0, 1)) == ()  # both copies are under way


def test_a_step_that_is_not_whole_is_protected_but_not_written() -> None:
    book = ledger()
    book.taken_over(4, whole=False, now=0.0)
    assert book.protected == (Key(3, 4),)
    book.want_persist()
    assert book.next_persist(0.0) is None
    assert book.is_settled, "nobody waits for what cannot be"
    complete(book, 5)
    assert book.next_persist(0.0) == 5


def test_a_step_that_can_never_be_durable_does_not_keep_training_from_going_on() -> None:
    book = ledger(policy=PersistPolicy(max_unprotected_s=10.0))
    book.restored(4, durable=False, whole=False, now=0.0)
    assert granted(book, 0, 5, now=1000.0)


def test_a_rank_saves_a_step_once_and_never_an_older_one() -> None:
    book = ledger(world=1)
    complete(book, 5, world=1)
    assert not granted(book, 0, 5)
    assert not granted(book, 0, 4)


def test_after_a_restore_history_begins_at_its_step() -> None:
    book = ledger(world=1)
    for step in (1, 2):
        complete(book, step, world=1)
    book.next_persist(0.0)
    book.restored(1, durable=True, now=0.0)
    assert (book.complete, book.durable, book.persisting) == (1, 1, None)
    assert book.persisted(2, error="", now=0.0) == ()
    assert granted(book, 0, 2)
    book.restored(None, durable=False, now=0.0)
    assert granted(book, 0, 1)


def test_a_step_goes_to_storage_by_steps_by_seconds_or_when_asked() -> None:
    book = ledger(world=1, policy=PersistPolicy(every_steps=10))
    complete(book, 1, world=1)
    assert book.next_persist(0.0) == 1
    book.persisted(1, error="", now=0.0)
    complete(book, 10, world=1)
    assert book.next_persist(0.0) is None
    book.want_persist()
    assert book.next_persist(0.0) == 10
    book.persisted(10, error="", now=0.0)
    complete(book, 20, world=1)
    assert book.next_persist(0.0) == 20

    book.persisted(20, error="", now=0.0)
    assert granted(book, 0, 21)
    book.want_persist()  # the last step is on its way while somebody waits for the end
    assert book.next_persist(0.0) is None
    book.sealed(0, 21)
    assert book.next_persist(0.0) == 21
    book.persisted(21, error="", now=0.0)
    assert granted(book, 0, 22)
    book.want_persist()
    assert book.next_persist(0.0) is None
    book.failed(0, 22, reason="it never came", now=0.0)
    assert book.next_persist(0.0) is None
    complete(book, 23, world=1)
    assert book.next_persist(0.0) is None, "that wish ended with the step that it was for"

    timed = ledger(world=1, policy=PersistPolicy(every_s=60.0))
    complete(timed, 1, world=1)
    assert timed.next_persist(0.0) == 1
    timed.persisted(1, error="", now=1.0)
    complete(timed, 2, world=1)
    assert timed.next_persist(59.0) is None
    assert timed.next_persist(60.0) == 2


def test_the_age_of_the_newest_durable_step_is_told_while_storage_refuses() -> None:
    book = ledger(world=1)
    complete(book, 1, world=1)
    assert book.next_persist(0.0) == 1
    book.persisted(1, error="", now=5.0)
    complete(book, 2, world=1)
    assert book.next_persist(6.0) == 2
    book.persisted(2, error="no space", now=7.0)
    assert book.trouble(27.0) == "no space; step 1 is the newest durable, and none was added for 20 s"
    assert book.trouble(1e9, storage="").startswith("no space")


def test_without_a_durable_step_for_too_long_nothing_is_granted() -> None:
    book = ledger(world=2, policy=PersistPolicy(max_unprotected_s=60.0))
    complete(book, 1, world=2)
    assert book.next_persist(0.0) == 1
    book.persisted(1, error="503", now=50.0)
    assert granted(book, 0, 2)
    answer, _ = book.ask(1, 2, now=61.0)
    assert answer is not None
    assert answer.granted, "what was granted to one rank is granted to all"
    for rank in range(2):
        book.sealed(rank, 2)
    for rank, now in ((0, 61.0), (1, 20.0)):
        answer, _ = book.ask(rank, 3, now=now)
        assert answer is not None
        assert (answer.granted, answer.unprotected) == (False, True)
        assert answer.reason == "no step became durable for 61 s, and 60 s are allowed: 503"
    assert book.next_persist(70.0) == 2
    book.persisted(2, error="", now=70.0)
    answer, _ = book.ask(0, 4, now=100.0)
    assert answer is not None
    assert answer.granted
