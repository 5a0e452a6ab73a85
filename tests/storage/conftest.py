"""The object store of the tests of backups."""

from collections.abc import Iterator

import pytest

from tests.rclone import S3Server


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3") / "buckets")
    yield server
    server.close()
