"""The text of a file, parsed: JSON, DeepSpeed's Hjson, YAML, TOML or a shell script. Nothing in it is executed.

YAML and Hjson are read with their libraries, the extra `files`. A repeated key is refused, though most readers take the
last one without a word. So are YAML's aliases: a file of 300 bytes can unfold to gigabytes.
"""

from __future__ import annotations

import math
import tomllib
from typing import Any

from zerosim.config.inputs import LARGEST_TEXT, check_values, once, parse_json, read_file, read_toml
from zerosim.errors import InputError

INSTALL = "pip install 'pyyaml>=6' 'hjson>=3.1'"
"""The extra `files`."""


def parsed(path: str) -> Any:
    """Return a file's values, by its suffix: `.json`, `.yaml` and `.yml`, `.toml`; a script's text otherwise.

    Raises: InputError, in one line, for a file that cannot be read or parsed.
    """
    if path.endswith(".toml"):
        return read_toml(path, "scenario")
    text = _decoded(path)
    if path.endswith((".yaml", ".yml")):
        check_values(values := parse_yaml(path, text), path)
        return _named(path, values)
    if path.endswith((".json", ".hjson")):
        return _named(path, parse_any_json(path, text))
    return text


def _decoded(path: str) -> str:
    raw = read_file(path, "scenario", LARGEST_TEXT)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 at byte {error.start}: save it as UTF-8") from None


def parse_any_json(path: str, text: str) -> Any:
    """Parse JSON, or else Hjson, as DeepSpeed does: comments, trailing commas and unquoted words pass there alone."""
    try:
        return parse_json(text, f"scenario {path}")
    except InputError as error:
        if "appears twice" in str(error):
            raise InputError(f"{error}. DeepSpeed refuses it; the Trainer and accelerate take the last") from None
        if "is not JSON" not in str(error):
            raise
        try:
            import hjson
        except ImportError:
            if any(mark in text for mark in ("#", "//", "/*", "'")):
                more = f"; if it has comments, as DeepSpeed's files may: {INSTALL}"
                raise InputError(f"{error}{more}") from None
            raise error from None
        try:
            values = hjson.loads(text, object_pairs_hook=once(path))
        except InputError:
            raise
        except (ValueError, RecursionError):
            raise error from None
        if not isinstance(values, dict):
            raise error from None
        check_values(values, path)
        return Hjson(values)


def parse_toml(path: str, text: str) -> Any:
    """Parse TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not valid TOML: {error}") from None


class Hjson(dict[str, Any]):
    """Values that only DeepSpeed itself reads: they were no plain JSON."""


def parse_yaml(path: str, text: str) -> Any:
    """Parse one YAML document with PyYAML's safe loader."""
    try:
        import yaml
    except ImportError:
        raise InputError(f"{path}: YAML needs a library: {INSTALL}") from None

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                line = self.get_mark().line + 1
                raise InputError(f"{path}: line {line}: an alias (*name): write the value where it is used")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            for index, (key, _) in enumerate(node.value):
                if any(key.value == other.value for other, _ in node.value[:index]):
                    line = key.start_mark.line + 1
                    raise InputError(f"{path}: line {line}: {key.value!r} appears twice; keep one")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)  # a safe loader
    except InputError:
        raise
    except yaml.YAMLError as error:
        words = " ".join(str(error).replace('in "<unicode string>", ', "in ").split())
        raise InputError(f"{path} is not YAML: {words}") from None
    except (RecursionError, ValueError) as error:
        raise InputError(f"{path} cannot be read as YAML: {error}") from None


def _named(path: str, values: Any, key: str = "") -> Any:
    """Return the values. Raises: InputError for NaN, and for keys that are no text."""
    if isinstance(values, float) and math.isnan(values):
        raise InputError(f"{path}: {key}: NaN is no number; write one, or leave the key out")
    if isinstance(values, dict):
        for name, value in values.items():
            if not isinstance(name, str):
                raise InputError(f"{path}: {name!r}: expected a name; put it in quotes")
            _named(path, value, f"{key}.{name}".lstrip("."))
    elif isinstance(values, list):
        for value in values:
            _named(path, value, key)
    return values
