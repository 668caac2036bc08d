"""The tests of a file, and of files that share programs, run on one worker."""

import os

import pytest


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process runs all tests")
def test_a_test_is_known_by_its_group(request):
    """xdist tells groups by what follows the @; without it every test, and each worker's fixtures, go anywhere."""
    ids = {item.path.stem: item.nodeid.rpartition("@")[2] for item in request.session.items}
    assert ids["test_workers"] == "test_workers"
    assert all(ids[name] == "test_train_grpo" for name in ("test_train", "test_rollout") if name in ids)
