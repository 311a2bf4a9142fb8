"""A resolved config as YAML, for a run to keep. Imports no JAX."""

import json
from collections.abc import Mapping
from typing import Any

import yaml

from k3train.config.yaml_reader import scalar


class _Dumper(yaml.SafeDumper):
    """PyYAML's writer, but quoting all text that our YAML 1.2 reader would take for something else (``1e-4``)."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = None if isinstance(scalar(text), str) else "'"
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def dump_config(config: Mapping[str, Any]) -> str:
    """A resolved config as YAML that ``config/yaml_reader.py`` reads back equal; innermost lists stay on one line."""
    plain = json.loads(json.dumps(config))
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
