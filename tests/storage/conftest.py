"""The object store of the tests of backups, and a Redis for each test that asks for one."""

from collections.abc import Iterator

import pytest

from tests.rclone import S3Server
from tests.redis_server import RedisServer


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3") / "buckets")
    yield server
    server.close()


@pytest.fixture
def server() -> Iterator[RedisServer]:
    running = RedisServer()
    yield running
    running.close()
