"""A fake cluster whose state a test may change; each test gets it as it was made."""

from collections.abc import Iterator

import pytest

from tests.conftest import CLUSTER
from tests.kubernetes.cluster import Cluster


def pytest_itemcollected(item: pytest.Item) -> None:
    for mark in CLUSTER:
        item.add_marker(getattr(pytest.mark, mark))


@pytest.fixture
def fake(cluster: Cluster | None) -> Iterator[Cluster]:
    if cluster is None:
        pytest.skip("a real cluster is not to be broken")
    cluster.reset()
    yield cluster
    cluster.reset()


@pytest.fixture(params=["pods", "sandboxes"])
def kind(request: pytest.FixtureRequest, fake: Cluster) -> str:
    """Both kinds of objects."""
    fake.has_sandboxes = ["v1beta1"] if request.param == "sandboxes" else []
    kind: str = request.param
    return kind
