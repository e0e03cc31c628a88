"""What is checked on a GPU is skipped elsewhere; models are those of the device's own tests."""

import pytest
import torch
from tests.unit.device.conftest import checkpoint  # noqa: F401  a fixture


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))
