"""What a user may ask for, as pure counts."""

from hypothesis import given
from hypothesis import strategies as st

from mcp_sandbox.web.in_flight import ConcurrencyLimit, RateLimit


@given(st.lists(st.floats(min_value=0, max_value=3), max_size=200), st.integers(1, 20))
def test_no_user_gets_more_than_the_rate_and_its_burst(
    pauses: list[float], per_second: int
) -> None:
    rate, now, granted = RateLimit(per_second), 0.0, 0
    for pause in pauses:
        now += pause
        granted += rate.take("alice", now) == 0
        assert granted <= per_second * (now + 10) + 1e-6
    assert rate.take("bob", now) == 0


def test_who_waits_as_told_is_served() -> None:
    rate = RateLimit(2)
    while not (wait_s := rate.take("alice", 0.0)):
        pass
    assert rate.take("alice", float(wait_s)) == 0


def test_large_messages_count_as_many_requests() -> None:
    rate = RateLimit(100)
    assert rate.take("alice", 0.0) == 0
    rate.charge("alice", 16 << 20)
    granted = 0
    while not rate.take("alice", 0.0):
        granted += 1
    assert granted == 1000 - 1 - 256


def test_who_sent_the_largest_message_is_served_again() -> None:
    rate = RateLimit(1)
    assert rate.take("alice", 0.0) == 0
    rate.charge("alice", 1 << 30)
    wait_s = rate.take("alice", 0.0)
    assert wait_s <= 10
    assert rate.take("alice", float(wait_s)) == 0


def test_what_is_given_back_makes_room() -> None:
    share = ConcurrencyLimit(100)
    with share.of("alice") as take, share.of("bob") as bob:
        assert [take(60), take(60), bob(60), take(40)] == [True, False, True, True]
        with share.of("alice") as another:
            assert not another(1)
    with share.of("alice") as take:
        assert take(100)
