"""What a user may ask for, as pure counts and names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sandbox.server.hosts import AllowedHosts, parse_host
from mcp_sandbox.server.limits import AtOnce, Bytes, Rate, Sessions


@given(st.lists(st.floats(min_value=0, max_value=3), max_size=200), st.integers(1, 20))
def test_no_user_gets_more_than_the_rate_and_its_burst(
    pauses: list[float], per_second: int
) -> None:
    rate, now, granted = Rate(per_second), 0.0, 0
    for pause in pauses:
        now += pause
        granted += rate.take("alice", now) == 0
        assert granted <= per_second * (now + 10) + 1e-6
    assert rate.take("bob", now) == 0


def test_who_waits_as_told_is_served() -> None:
    rate = Rate(2)
    while not (wait_s := rate.take("alice", 0.0)):
        pass
    assert rate.take("alice", float(wait_s)) == 0


def test_large_messages_count_as_many_requests() -> None:
    rate = Rate(100)
    assert rate.take("alice", 0.0) == 0
    rate.charge("alice", 16 << 20)
    granted = 0
    while not rate.take("alice", 0.0):
        granted += 1
    assert granted == 1000 - 1 - 256


def test_who_sent_the_largest_message_is_served_again() -> None:
    rate = Rate(1)
    assert rate.take("alice", 0.0) == 0
    rate.charge("alice", 1 << 30)
    wait_s = rate.take("alice", 0.0)
    assert wait_s <= 10
    assert rate.take("alice", float(wait_s)) == 0


def test_bytes_that_are_answered_make_room() -> None:
    held = Bytes(100)
    assert [held.add("alice", 60), held.add("alice", 60), held.add("bob", 60)] == [
        True,
        False,
        True,
    ]
    held.remove("alice", 60)
    assert held.add("alice", 100)


def test_who_leaves_makes_room() -> None:
    at_once = AtOnce(2)
    assert [at_once.enter("alice") for _ in range(3)] == [True, True, False]
    assert at_once.enter("bob")
    at_once.leave("alice")
    assert at_once.enter("alice")


def opened(sessions: Sessions, user: str, session_id: str, now: float) -> bool:
    held = sessions.begin(user, None, now)
    if held is not None:
        sessions.end(held, now, session_id)
    return held is not None


def test_idle_sessions_count_no_longer_than_they_live() -> None:
    sessions = Sessions(2, idle_s=100)
    assert opened(sessions, "alice", "a", 0)
    assert opened(sessions, "alice", "b", 0)
    busy = sessions.begin("alice", "b", 50)
    assert busy is not None
    assert not opened(sessions, "alice", "c", 99)
    assert opened(sessions, "alice", "c", 101)
    assert not opened(sessions, "alice", "d", 150)
    sessions.end(busy, 200)
    assert not opened(sessions, "alice", "d", 200)
    assert opened(sessions, "alice", "d", 301)


def test_sessions_that_are_being_opened_count() -> None:
    sessions = Sessions(2, idle_s=100)
    held = [sessions.begin("alice", None, 0) for _ in range(3)]
    assert [each is not None for each in held] == [True, True, False]
    assert held[0] is not None
    sessions.end(held[0], 0)
    assert sessions.begin("alice", None, 0) is not None


def test_nobody_ends_or_prolongs_anothers_session() -> None:
    sessions = Sessions(1, idle_s=100)
    assert opened(sessions, "alice", "a", 0)
    other = sessions.begin("bob", "a", 90)
    assert other is not None
    sessions.forget("bob", "a")
    assert not opened(sessions, "alice", "b", 100)
    assert opened(sessions, "alice", "b", 101)


@given(st.text(max_size=60))
def test_a_host_that_is_allowed_is_one_of_the_names(text: str) -> None:
    hosts = AllowedHosts("192.0.2.7:8080", ["box.example.org"])
    if hosts.allows_host(text):
        name, _, _ = text.lower().rpartition(":") if not text.endswith("]") else (text, "", "")
        known = {"localhost", "127.0.0.1", "[::1]", "192.0.2.7", "box.example.org"}
        assert {text.lower(), name} & known


@pytest.mark.parametrize("host", ["192.0.2.7:8080", "box.example.org", "BOX.example.org:1"])
def test_own_names_are_allowed(host: str) -> None:
    hosts = AllowedHosts("192.0.2.7:8080", ["box.example.org"])
    assert hosts.allows_host(host)
    assert hosts.allows_origin(f"http://{host}")
    assert not hosts.allows_origin(host)


@pytest.mark.parametrize("host", ["192.0.2.7:81", "192.0.2.7", "0.0.0.0:8080", "x.box.example.org"])
def test_other_names_are_not(host: str) -> None:
    assert parse_host(host) is not None
    assert not AllowedHosts("192.0.2.7:8080", ["box.example.org"]).allows_host(host)
