"""From a YAML or TOML file and `--a.b=c` overrides to a checked Config; strict, one sentence for every mistake."""

import ast
import dataclasses
import functools
import inspect
import pathlib
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from mhar_jax.config import schema
from mhar_jax.config.schema import Config
from mhar_jax.errors import UserError

# Fields that may change between a checkpoint and its continuation: they decide neither the parameters, nor the data,
# nor the arithmetic. `steps` is here so that a run can be prolonged; the schedule is then the new one.
MAY_CHANGE = (
    "run_dir",
    "steps",
    "mesh",
    "eval",
    "checkpoint",
    "log",
    "sample",
    "data.path",  # the data's own fingerprint is compared instead, and the iterator's identity: files may move
    "data.held_out_path",
    "data.tokenizer",
    "data.workers",
    "data.prefetch",
    "optimizer.not_finite",  # of steps that are finite, both do the same
    "model.remat",
    "model.routing_implementation",
    "model.attention_implementation",
    "model.loss_chunk",
)


def load_config(file: str | pathlib.Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The Config of a file (a path, or the name of a preset in `configs/`) with overrides applied in order.

    Args:
      file: YAML or TOML; None: all defaults.
      overrides: `a.b=c`, with or without leading dashes. Values are read as YAML; `null` and `none` mean None.

    Raises:
      UserError: a missing file, an unknown field, a value of the wrong type or out of range.
    """
    values: dict[str, Any] = {} if file is None else read_file(find_file(file))
    for override in overrides:
        name, separator, text = override.lstrip("-").partition("=")
        if not separator or not name:
            raise UserError(f"an override must look like --field=value, got {override!r}")
        _set(values, name, text)
    return make_config(values)


def make_config(values: Mapping[str, Any]) -> Config:
    """The Config of nested mappings, as a file or a checkpoint holds them.

    Raises:
      UserError: see `load_config`.
    """
    _check_fields(values, Config, "")
    try:
        return TypeAdapter(Config).validate_python(values)
    except ValidationError as error:
        raise UserError("; ".join(complaint(e) for e in error.errors())) from None


def find_file(file: str | pathlib.Path) -> pathlib.Path:
    """A path that exists: as given, or a preset of `configs/` by its bare name.

    Raises:
      UserError: naming the presets.
    """
    path = pathlib.Path(file)
    if path.is_file():
        return path
    presets = presets_directory()
    found = presets / f"{path.name}.yaml"
    if path.parent == pathlib.Path(".") and not path.suffix and found.is_file():
        return found
    names = ", ".join(sorted(p.stem for p in presets.glob("*.yaml"))) or "none"
    raise UserError(f"config file {str(file)!r} does not exist; give a path or one of the presets {names}")


def presets_directory() -> pathlib.Path:
    """`configs/` of the source tree."""
    return pathlib.Path(__file__).parent.parent.parent / "configs"


def read_file(path: pathlib.Path) -> dict[str, Any]:
    """The nested mappings of a YAML or TOML file.

    Raises:
      UserError: not readable, not YAML or TOML, or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else yaml.load(text, _UniqueKeys)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())
        raise UserError(f"config file {path} cannot be read: {reason}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"config file {path} must hold fields and values, got {type(values).__name__}")
    return values


class _UniqueKeys(yaml.SafeLoader):
    """YAML where a field given twice is an error, as it is in TOML, instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the field {key.value} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def to_dict(config: Config) -> dict[str, Any]:
    """Nested mappings of plain values, resolved; `make_config` gives the Config back."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    """The resolved config as the text of `config.yaml`."""
    return yaml.safe_dump(_plain(to_dict(config)), sort_keys=False)


def differences(saved: Mapping[str, Any], config: Config) -> list[str]:
    """What of a checkpoint's config forbids going on with this one: `field was a and is b`, one entry a field."""
    before = dict(_leaves(_plain(to_dict(make_config(saved)))))
    now = dict(_leaves(_plain(to_dict(config))))
    return [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and not any(name == f or name.startswith(f"{f}.") for f in MAY_CHANGE)
    ]


@dataclasses.dataclass(frozen=True)
class FieldHelp:
    """One field as `--help` shows it."""

    name: str  # dotted
    type: str
    default: str
    text: str


def describe_fields() -> list[FieldHelp]:
    """Every field of Config, depth first."""
    return list(_describe(Config, ""))


def _describe(cls: type, prefix: str) -> Iterator[FieldHelp]:
    comments = _comments()[cls.__name__]
    for f in dataclasses.fields(cls):
        inner = _section(cls, f.name)
        if inner is not None and f.default is dataclasses.MISSING:
            yield from _describe(inner, f"{prefix}{f.name}.")
            continue
        yield FieldHelp(prefix + f.name, _type_name(_hints(cls)[f.name]), repr(f.default), comments.get(f.name, ""))


@functools.cache
def _comments() -> dict[str, dict[str, str]]:
    """The comment behind each field in the schema's source: the one place where fields are explained."""
    source = inspect.getsource(schema)
    lines = source.splitlines()
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            fields = [n for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
            found[node.name] = {
                typing.cast(ast.Name, n.target).id: lines[(n.end_lineno or n.lineno) - 1].partition("  # ")[2]
                for n in fields
            }
    return found


def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=False)


def _section(cls: type, name: str) -> type | None:
    """The dataclass that a field holds, where it holds one."""
    return next(
        (o for o in _options(_hints(cls).get(name)) if isinstance(o, type) and dataclasses.is_dataclass(o)), None
    )


def _options(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "|".join(str(a) for a in typing.get_args(hint))
    if len(_options(hint)) > 1:
        return "|".join(_type_name(a) for a in _options(hint))
    if hint is types.NoneType:
        return "None"
    return getattr(hint, "__name__", str(hint)) if typing.get_origin(hint) is None else str(hint)


def _check_fields(values: Mapping[str, Any], cls: type, prefix: str) -> None:
    """Unknown names, sections that are no sections, and booleans for numbers, which pydantic would take as 0 and 1."""
    for name, value in values.items():
        _check_name(name, cls, prefix)
        section = _section(cls, name)
        if section is None:
            _check_no_boolean(value, _hints(cls)[name], prefix + name)
        elif isinstance(value, Mapping):
            _check_fields(value, section, f"{prefix}{name}.")
        elif value is not None or types.NoneType not in _options(_hints(cls)[name]):
            inner = ", ".join(f.name for f in dataclasses.fields(section))
            raise UserError(f"config field {prefix}{name} has the fields {inner}, got the plain value {value!r}")


def _check_name(name: Any, cls: type, prefix: str) -> None:
    valid = [f.name for f in dataclasses.fields(cls)]
    if name not in valid:
        where = f"{cls.__name__} ({prefix[:-1]})" if prefix else "a config"
        raise UserError(f"unknown config field {prefix}{name}; the fields of {where} are {', '.join(valid)}")


def _check_no_boolean(value: Any, hint: Any, name: str) -> None:
    values = value if isinstance(value, list | tuple) else [value]
    if bool not in _options(hint) and any(isinstance(v, bool) for v in values):
        raise UserError(f"config field {name} must be {_type_name(hint)}, got {value!r}")


def _set(values: dict[str, Any], name: str, text: str) -> None:
    """Puts an override into the nested values."""
    *sections, last = name.split(".")
    cls: type = Config
    here, prefix = values, ""
    for section in sections:
        _check_name(section, cls, prefix)
        inner = _section(cls, section)
        if inner is None:
            raise UserError(f"config field {prefix}{section} is a plain value, so {name} does not exist")
        if not isinstance(here.get(section), dict):
            here[section] = {}
        here, cls, prefix = here[section], inner, f"{prefix}{section}."
    _check_name(last, cls, prefix)
    here[last] = _value(text, _hints(cls)[last], name)


def _value(text: str, hint: Any, name: str) -> Any:
    options = _options(hint)
    if types.NoneType in options and text.lower() in ("null", "none", "~"):
        return None
    if str in options or any(typing.get_origin(o) is typing.Literal for o in options):
        return text
    try:
        return yaml.load(text, _UniqueKeys)
    except yaml.YAMLError:
        raise UserError(f"config field {name} cannot be read from {text!r}") from None


def complaint(error: Any) -> str:
    """One of the errors of a pydantic `ValidationError`, as a user reads it."""
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "value_error":  # our own checks name their fields
        return f"{name + ': ' if name else ''}{error['ctx']['error']}"
    message = error["msg"][0].lower() + error["msg"][1:]
    return f"config field {name}: {message}, got {error['input']!r}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
