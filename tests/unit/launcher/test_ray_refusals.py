"""What Ray says when it cannot be joined is the operator's to read, in one line."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from drumline.core.config import Config
from drumline.core.errors import ConfigError
from drumline.launcher.ray_cluster import placed_on_ray


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConnectionError("nobody there"), "no Ray cluster is found here; see `ray start`"),
        (RuntimeError("Version mismatch: the cluster has 2.9\nand so on"), "Version mismatch: the"),
        (ValueError("bad address"), "the Ray cluster cannot be joined: bad address"),
        (TimeoutError(), "the Ray cluster cannot be joined: TimeoutError"),
    ],
)
def test_a_cluster_that_cannot_be_joined_is_refused_with_its_words(monkeypatch, error, told):
    ray = ModuleType("ray")
    ray.__spec__ = ModuleSpec("ray", None)

    def init(**_):
        raise error

    ray.init = init
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(ConfigError) as caught, placed_on_ray(Config()):
        pass
    assert caught.value.setting == "--distributed-backend"
    assert told in caught.value.reason
    assert "\n" not in caught.value.reason
