"""Names of replicas, with the time given."""

from __future__ import annotations

from streamer.replicas.directory import LEASE_S, Directory


def test_a_name_is_the_lowest_free_one_and_free_again_when_its_lease_ends() -> None:
    directory = Directory(0.0)
    assert [directory.claim(holder, 0.0) for holder in "abc"] == ["r0", "r1", "r2"]
    for name, holder in (("r0", "a"), ("r2", "c")):
        assert directory.renew(name, holder, f"host-{holder}:1", LEASE_S)
    assert directory.claim("d", LEASE_S + 0.1) == "r1"
    assert not directory.renew("r1", "b", "host-b:1", LEASE_S + 0.2)
    assert directory.members(LEASE_S + 0.2) == {"r0": "host-a:1", "r2": "host-c:1"}


def test_a_replica_that_loads_is_no_member_yet() -> None:
    directory = Directory(0.0)
    name = directory.claim("a", 0.0)
    assert name == "r0"
    assert directory.renew(name, "a", "", 1.0)
    assert directory.members(1.0) == {}


def test_only_its_holder_gives_a_name_back() -> None:
    directory = Directory(0.0)
    directory.claim("a", 0.0)
    directory.release("r0", "b")
    assert directory.claim("c", 0.0) == "r1"
    directory.release("r0", "a")
    assert directory.claim("d", 0.0) == "r0"


def test_a_directory_that_began_anew_gives_no_name_before_it_can_know_those_in_use() -> None:
    directory = Directory(100.0, is_restarted=True)
    assert directory.claim("new", 100.5) is None
    assert directory.renew("r0", "old", "host:1", 101.0)
    assert directory.members(101.0) == {"r0": "host:1"}
    assert directory.claim("new", 100.0 + LEASE_S) == "r1"
