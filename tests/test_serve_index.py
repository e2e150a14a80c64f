"""The prefix index of the example server: chains, leases, eviction, and what a restart finds."""

from __future__ import annotations

from pathlib import Path

from prefix_index import PrefixIndex, digests_of


def chain(name: str, count: int) -> list[str]:
    return digests_of([ord(name), *range(2 * count - 1)], block_size=2, namespace="test")


def keep(index: PrefixIndex, digests: list[str]) -> list[int]:
    reserved = index.reserve(digests)
    index.publish(reserved, digests)
    return list(reserved.values())


def kept(index: PrefixIndex, digests: list[str]) -> int:
    with index.lease(digests) as slots:
        return len(slots)


def test_a_digest_says_everything_before_the_block() -> None:
    tokens = list(range(12))
    digests = digests_of(tokens, block_size=4, namespace="model")
    assert len(set(digests)) == 3
    # What fills no block has a digest as well, which is not that of a block that begins so.
    part = digests_of([*tokens, 99], block_size=4, namespace="model")
    assert part[:3] == digests
    assert part[3] != digests_of([*tokens, 99, 0], block_size=4, namespace="model")[3]
    other = digests_of([99, *tokens[1:]], block_size=4, namespace="model")
    assert not set(other) & set(digests)
    assert not set(digests_of(tokens, block_size=4, namespace="other model")) & set(digests)


def test_only_what_is_published_is_found() -> None:
    index, digests = PrefixIndex(8), chain("a", 3)
    reserved = index.reserve(digests)
    assert list(reserved.values()) == [0, 1, 2]
    assert kept(index, digests) == 0
    assert index.reserve(digests) == {}  # someone is writing them
    index.publish(reserved, digests)
    assert kept(index, digests) == 3
    assert kept(index, digests[:2] + chain("b", 3)) == 2


def test_slots_that_were_given_up_are_used_again() -> None:
    index, digests = PrefixIndex(2), chain("a", 2)
    index.give_up(index.reserve(digests))
    assert kept(index, digests) == 0
    assert sorted(keep(index, digests)) == [0, 1]


def test_the_end_of_the_oldest_chain_goes_first() -> None:
    index, old, new = PrefixIndex(5), chain("a", 3), chain("b", 2)
    keep(index, old[:2])
    keep(index, old)  # its end is the youngest block now, and must go before its head all the same
    keep(index, new)
    assert len(keep(index, chain("c", 1))) == 1
    assert kept(index, old) == 2
    assert kept(index, new) == 2


def test_leased_slots_stay() -> None:
    index, digests = PrefixIndex(2), chain("a", 2)
    keep(index, digests)
    with index.lease(digests) as slots:
        assert index.reserve(chain("b", 2)) == {}
        assert len(slots) == 2
    assert len(index.reserve(chain("b", 2))) == 2


def test_a_chain_does_not_evict_itself() -> None:
    index, digests = PrefixIndex(2), chain("a", 4)
    keep(index, digests[:2])
    assert index.reserve(digests) == {}
    assert kept(index, digests) == 2


def test_forgotten_blocks_are_not_found_and_their_slots_not_used() -> None:
    index, digests = PrefixIndex(2), chain("a", 2)
    keep(index, digests)
    index.forget(digests[1:])
    assert kept(index, digests) == 1
    assert len(index.reserve(chain("b", 2))) == 1  # that of the block that is left


def test_a_restart_finds_what_was_written_and_the_order(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    index, old, new = PrefixIndex(4), chain("a", 2), chain("b", 2)
    keep(index, old)
    keep(index, new)
    index.write(path)
    again = PrefixIndex.open(path, 4)
    assert len(again) == 4
    keep(again, chain("c", 2))
    assert kept(again, old) == 0
    assert kept(again, new) == 2


def test_a_crash_leaves_no_old_index(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    index = PrefixIndex(4)
    keep(index, chain("a", 2))
    index.write(path)
    PrefixIndex.open(path, 4)  # and never written again
    assert len(PrefixIndex.open(path, 4)) == 0
    assert not list(tmp_path.iterdir())


def test_an_index_for_other_slots_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    index = PrefixIndex(4)
    keep(index, chain("a", 2))
    index.write(path)
    assert len(PrefixIndex.open(path, 5)) == 0
    path.write_text("{not JSON")
    assert len(PrefixIndex.open(path, 4)) == 0
