"""Which step is restored, and from where."""

from __future__ import annotations

from easyckpt.saver.peering import Source
from easyckpt.saver.protocol import Held, Key
from easyckpt.saver.shares import roster_of
from easyckpt.tiers import OnDisk, Plan, choose

HOMES = {0: 0, 1: 1}


def held(step: int, rank: int, *, generation: int = 1, digest: str | None = None, world: int = 2) -> Held:
    return Held(
        key=Key(generation, step), rank=rank, world_size=world, digest=digest or f"{generation}.{step}.{rank}"
    )


def equal(
    step: int,
    rank: int,
    *,
    of: tuple[str, ...] = ("a",),
    data: str = "a",
    world: int = 2,
    generation: int = 1,
) -> Held:
    """A piece of a step whose ranks had these data."""
    return Held(
        key=Key(generation, step), rank=rank, world_size=world, digest=f"{generation}.{step}.{rank}",
        data=data, roster=roster_of(of),
    )  # fmt: skip


def disk(step: int, *, generation: int = 1, like: int = 1, world: int = 2) -> OnDisk:
    digests = {rank: f"{like}.{step}.{rank}" for rank in range(world)}
    return OnDisk(step=step, generation=generation, world_size=world, digests=digests)


def tiers(plan: Plan | None) -> list[str]:
    assert plan is not None
    return [source.tier for source in plan.sources]


def test_the_newest_step_that_covers_every_rank() -> None:
    memory = {0: [held(1, 0), held(2, 0), held(3, 0)], 1: [held(1, 1), held(2, 1)]}
    plan = choose(memory, (), node_of_rank=HOMES)
    assert plan is not None
    assert (plan.step, tiers(plan), plan.durable) == (2, ["memory", "memory"], False)


def test_steps_that_are_set_aside_are_nowhere() -> None:
    memory = {0: [held(step, 0) for step in (2, 3, 4)], 1: [held(step, 1) for step in (2, 3, 4)]}
    for below, step, durable in ((5, 4, False), (4, 3, True), (2, 1, True)):
        plan = choose(memory, [disk(1), disk(3)], node_of_rank=HOMES, below=below)
        assert plan is not None
        assert (plan.step, plan.durable) == (step, durable)
    assert choose(memory, [disk(1), disk(3)], node_of_rank=HOMES, below=1) is None


def test_a_lost_piece_comes_from_the_peer_then_from_storage() -> None:
    memory = {0: [held(2, 0), held(2, 1)], 1: [held(1, 1)]}
    plan = choose(memory, [disk(2)], node_of_rank=HOMES)
    assert tiers(plan) == ["memory", "peer"]
    assert plan is not None
    again = choose(memory, [disk(2)], node_of_rank=HOMES, bad=frozenset({plan.sources[1]}))
    assert tiers(again) == ["memory", "disk"]


def test_tiers_mix_only_if_their_digests_prove_that_it_is_the_same_save() -> None:
    memory = {0: [held(2, 0)]}
    assert tiers(choose(memory, [disk(2)], node_of_rank=HOMES)) == ["memory", "disk"]
    other = choose(memory, [disk(2, like=7)], node_of_rank=HOMES)
    assert tiers(other) == ["disk", "disk"]


def test_the_same_step_of_two_generations_is_never_mixed() -> None:
    memory = {0: [held(2, 0, generation=1)], 1: [held(2, 1, generation=2)]}
    assert choose(memory, (), node_of_rank=HOMES) is None


def test_of_equal_steps_the_later_generation_wins() -> None:
    memory = {
        0: [held(2, 0, generation=1), held(2, 0, generation=2)],
        1: [held(2, 1, generation=1), held(2, 1, generation=2)],
    }
    plan = choose(memory, (), node_of_rank=HOMES)
    assert plan is not None
    assert plan.memory_key == Key(2, 2)


def test_another_world_size_needs_every_saved_rank() -> None:
    memory = {0: [held(3, 0, world=3), held(3, 1, world=3)], 1: [held(3, 1, world=3)]}
    assert choose(memory, (), node_of_rank=HOMES) is None
    memory[1].append(held(3, 2, world=3))
    plan = choose(memory, [disk(2, world=4)], node_of_rank=HOMES)
    assert plan is not None
    assert (plan.step, plan.world_size, plan.reshaped) == (3, 3, True)
    places = [(source.rank, source.node_rank) for source in plan.sources]
    assert places == [(0, 0), (1, 0), (1, 1), (2, 1)]
    assert plan.holders(2) == ((0, 1), (2,))
    bad = frozenset({plan.sources[0]})
    older = choose(memory, [disk(2, world=4)], node_of_rank=HOMES, bad=bad)
    assert older is not None
    assert (older.step, older.world_size, tiers(older)) == (2, 4, ["disk"] * 4)


def test_a_lost_piece_of_another_world_size_comes_from_storage_if_it_is_the_same_save() -> None:
    memory = {0: [held(3, 0, world=3), held(3, 2, world=3)]}
    plan = choose(memory, [disk(3, world=3)], node_of_rank=HOMES)
    assert tiers(plan) == ["memory", "disk", "disk", "memory", "disk"]
    assert tiers(choose(memory, [disk(3, world=3, like=9)], node_of_rank=HOMES)) == ["disk"] * 3


def test_a_wanted_step_is_the_only_candidate() -> None:
    memory = {0: [held(1, 0), held(2, 0)], 1: [held(1, 1), held(2, 1)]}
    plan = choose(memory, (), node_of_rank=HOMES, step=1)
    assert plan is not None
    assert plan.step == 1
    assert choose(memory, (), node_of_rank=HOMES, step=3) is None


def test_when_all_sources_of_a_step_failed_an_older_one_is_taken() -> None:
    memory = {0: [held(1, 0), held(2, 0)], 1: [held(1, 1), held(2, 1)]}
    bad = frozenset({Source(rank=1, tier="memory", node_rank=1, digest="1.2.1")})
    plan = choose(memory, (), node_of_rank=HOMES, bad=bad)
    assert plan is not None
    assert plan.step == 1


def test_equal_ranks_cover_a_lost_one() -> None:
    plan = choose({0: [equal(5, 0)]}, [disk(3)], node_of_rank=HOMES)
    assert plan is not None
    assert (plan.step, plan.lost, plan.reshaped, plan.durable, tiers(plan)) == (
        5,
        (1,),
        True,
        False,
        ["memory"],
    )
    fewer = choose({0: [equal(5, 0)]}, (), node_of_rank={0: 0})
    assert fewer is not None
    assert (fewer.step, fewer.world_size, fewer.lost) == (5, 2, (1,))


def test_a_lost_rank_whose_tensors_nobody_has_is_not_covered() -> None:
    """Two groups of equal ranks, as replicas of shards are."""
    of, homes = ("a", "b"), {0: 0, 1: 1, 2: 2, 3: 3}
    there = {0: [equal(5, 0, of=of, world=4)], 2: [equal(5, 2, of=of, world=4)]}
    assert choose(there, (), node_of_rank=homes) is None
    there[1] = [equal(5, 1, of=of, data="b", world=4)]
    plan = choose(there, (), node_of_rank=homes)
    assert plan is not None
    assert plan.lost == (3,)
    assert choose({0: [held(5, 0)]}, (), node_of_rank=HOMES) is None, "nothing is known of the others"
    unknown = {0: [equal(5, 0, of=of, data="", world=4)], 1: [equal(5, 1, of=of, data="b", world=4)]}
    assert choose(unknown, (), node_of_rank=homes) is None


def test_a_whole_step_in_memory_is_better_than_a_newer_one_with_losses_and_storage_is_not() -> None:
    there = {0: [equal(5, 0), equal(4, 0)], 1: [equal(4, 1)]}
    plan = choose(there, [disk(3)], node_of_rank=HOMES)
    assert plan is not None
    assert (plan.step, plan.lost) == (4, ())
    plan = choose({0: [equal(5, 0)]}, [disk(5, like=9)], node_of_rank=HOMES)
    assert plan is not None
    assert (plan.step, plan.lost, plan.durable) == (5, (), True), "the same step, whole"
    assert choose({0: [equal(5, 0)]}, [disk(3)], node_of_rank=HOMES, step=3) == choose(
        {}, [disk(3)], node_of_rank=HOMES
    )


def test_what_failed_covers_nothing() -> None:
    there = {0: [equal(5, 0)], 1: [equal(5, 1)]}
    bad = {Source(rank=1, tier="memory", node_rank=1, digest="1.5.1")}
    plan = choose(there, (), node_of_rank=HOMES, bad=frozenset(bad))
    assert plan is not None
    assert plan.lost == (1,)
    bad.add(Source(rank=0, tier="peer", node_rank=0, digest="1.5.0"))
    bad.add(Source(rank=0, tier="memory", node_rank=0, digest="1.5.0"))
    assert choose(there, (), node_of_rank=HOMES, bad=frozenset(bad)) is None
