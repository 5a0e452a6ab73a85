"""Each shipped skill comes with one test, and passes it."""

import pytest

from mcp_sandbox.sessions.session import Session
from tests.e2e.attacks import on_docker_if_whole
from tests.shipped.conftest import learn, run
from tests.shipped.texts import NAMES, SHIPPED


@on_docker_if_whole
@pytest.mark.parametrize("name", NAMES)
async def test_it_passes_the_test_that_it_comes_with(session: Session, name: str) -> None:
    await learn(session, name)
    (test,) = (SHIPPED / name / "tests").iterdir()
    await run(session, f"cp -r /opt/skills/{name} trial && chmod -R u+w trial")
    await run(session, f"cd trial && bash tests/{test.name}")
