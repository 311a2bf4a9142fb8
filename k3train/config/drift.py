"""How two experiments differ, and what may become of each key when a run goes on. Imports no JAX.

Each key's class stands beside its field (``config/section.py``). A stored experiment may be of an earlier version: a
key it does not know had its default, which is what the code did then.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from k3train.config.schema import section_of
from k3train.config.section import Drift, Section

ABSENT = "(absent)"
_STRICTEST = (Drift.FROZEN, Drift.BRANCH, Drift.FREE, Drift.DERIVED)


class Change(NamedTuple):
    """One key with another value than before.

    Attributes:
      key: its dotted name.
      was: the value before, as JSON; ``ABSENT`` where there was none.
      now: the value now.
      drift: the key's class.
    """

    key: str
    was: Any
    now: Any
    drift: Drift


def classes(schema: type[Section], prefix: str = "") -> dict[str, Drift]:
    """The class of every key beneath ``schema`` by dotted name.

    A section counts as the strictest of its keys: that is what setting it to null, or giving it, changes.

    Raises:
      TypeError: a key has no class; names it.
    """
    out: dict[str, Drift] = {}
    for name, field in schema.model_fields.items():
        key, own, inner = prefix + name, _own(field), section_of(field.annotation)
        if inner is not None:
            below = classes(inner, f"{key}.")
            out[key] = own or strictest(below.values())
            out |= below
        elif (drift := own or schema.drift) is not None:
            out[key] = drift
        else:
            raise TypeError(f'{key} has no drift class; write class {schema.__name__}(Section, drift="...")')
    return out


def strictest(drifts: Iterable[Drift]) -> Drift:
    """The first of frozen, branch, free, derived that is among them."""
    return min(drifts, key=_STRICTEST.index)


def compare(schema: type[Section], old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The keys that differ between two resolved configs (``model_dump(mode="json")``), in the schema's order.

    Keys that only an earlier version knew are listed as derived: nothing reads them any more.
    """
    return _compare(schema, _plain(old), _plain(new), "", classes(schema))


def guarded(schema: type[Section], config: Mapping[str, Any]) -> dict[str, Any]:
    """The frozen and branch values of a resolved config by dotted name: what a run folder stands for."""
    known = classes(schema)
    flat = flatten(_plain(config))
    return {key: value for key, value in flat.items() if known.get(key) in (Drift.FROZEN, Drift.BRANCH)}


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"model.kda.num_heads": 4, ...}`` of nested mappings; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def derived(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """The facts of the surroundings (nested maps of an attempt's start line) that differ."""
    was, now = flatten(_plain(old)), flatten(_plain(new))
    keys = [*was, *(key for key in now if key not in was)]
    pairs = ((key, was.get(key, ABSENT), now.get(key, ABSENT)) for key in keys)
    return [Change(key, before, after, Drift.DERIVED) for key, before, after in pairs if before != after]


def _compare(
    schema: type[Section], old: dict[str, Any], new: dict[str, Any], prefix: str, known: dict[str, Drift]
) -> list[Change]:
    out: list[Change] = []
    for name, field in schema.model_fields.items():
        key, inner = prefix + name, section_of(field.annotation)
        was, now = old.get(name, _default(field)), new.get(name, _default(field))
        if inner is not None and isinstance(was, dict) and isinstance(now, dict):
            out += _compare(inner, was, now, f"{key}.", known)
        elif was != now:
            out.append(Change(key, was, now, known[key]))
    gone = (name for name in old if name not in schema.model_fields)
    return out + [Change(prefix + name, old[name], ABSENT, Drift.DERIVED) for name in gone]


def _own(field: FieldInfo) -> Drift | None:
    return next((item for item in field.metadata if isinstance(item, Drift)), None)


def _default(field: FieldInfo) -> Any:
    if field.is_required():
        return ABSENT
    value = field.get_default(call_default_factory=True)
    return value.model_dump(mode="json") if isinstance(value, Section) else _plain(value)


def _plain(value: Any) -> Any:
    """The value as JSON gives it back: lists for tuples."""
    return json.loads(json.dumps(value))
