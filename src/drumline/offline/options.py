"""The engine's configuration as keyword arguments."""

import difflib
from typing import Any

from drumline.core.config import Config
from drumline.core.errors import ConfigError
from drumline.core.settings import built, converted, settings_of


def config_of(model: str | None, options: dict[str, Any]) -> Config:
    """Return the configuration that keyword arguments name.

    An argument is a field's name, or a flag's spelling that another engine has for it,
    with underscores: `max_model_len=4096`. Raises ConfigError naming the argument.
    """
    known = {
        name.lstrip("-").replace("-", "_"): setting
        for setting in settings_of(Config)
        for name in setting.names
    }
    values = {}
    for name, said in ({"model": model} | options).items():
        setting = known.get(name)
        if setting is None:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(name, f"no such option{hint}")
        if isinstance(said, str) and setting.field == "served_model_name":
            said = (said,)  # noqa: PLW2901
        values[setting.place] = converted(name, setting, said)
    return built(Config, values)
