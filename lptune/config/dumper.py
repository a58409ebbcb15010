"""How configs are written as YAML, so that OmegaConf reads the same values back."""

from typing import Any

import yaml  # type: ignore[import-untyped]


class Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes text that looks like a number: OmegaConf reads 0E0 as a number, PyYAML does not and would not
    quote it.
    """


def _represent_text(dumper: Any, text: str) -> Any:
    style = "'" if text[:1] in tuple("+-.0123456789") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


Dumper.add_representer(str, _represent_text)
