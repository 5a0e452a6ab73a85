"""One daemon for tests that need no own."""

from collections.abc import AsyncGenerator

import pytest

from tests.control.daemon import Platform, platform


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def served(
    tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncGenerator[Platform]:
    # For as long as the tests of a module take.
    async with platform(tmp_path_factory.mktemp("served"), limit_s=600) as found:
        yield found
