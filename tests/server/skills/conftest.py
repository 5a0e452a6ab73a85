"""Where the sandboxes of these tests are: those of modules that open some are in pods too."""

from pathlib import Path

import pytest

from tests.e2e.attacks import BUBBLEWRAP, KUBERNETES

in_pods_too = pytest.mark.parametrize("data_root", [BUBBLEWRAP, KUBERNETES], indirect=True)


@pytest.fixture
def data_root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A data root that is named by its backend."""
    name: str = getattr(request, "param", "bubblewrap")
    if name == "kubernetes":
        request.getfixturevalue("cluster")
    return tmp_path / name
