"""Parses JSON, YAML and TOML to plain values; for YAML also the line of each key.

JSON may be of unknown origin. YAML and TOML are a person's own configuration, so only the types
that a configuration needs are read: mappings, lists, text, numbers, true, false and null. Tags are
not allowed, dates stay text, and numbers are those of YAML 1.2: 1e-4 is a number, 1:30 is not.
0100, which is 64 in YAML 1.1, is an error.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.reader import ReaderError
from yaml.resolver import Resolver

from dit.system_errors import explained, system_number

MOST_BYTES = 256 * 1024
_TOO_DEEP = "the text is nested too deeply; write fewer levels"

_TAGS = ("str", "int", "float", "bool", "null", "seq", "map", "merge", "value")
_LEADING_ZERO = "!leading-zero"
_SURROGATE = re.compile(r"[\ud800-\udfff]")


class YamlError(ValueError):
    """A text is not YAML or TOML of a configuration.

    `line` is the number of the line with the error, or None if that is unknown.
    """

    def __init__(self, problem: str, line: int | None = None):
        self.problem, self.line = problem, line
        super().__init__(problem if line is None else f"line {line}: {problem}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """The content of a YAML or TOML text."""

    values: Any
    lines: dict[str, int]  # dotted key -> line, from 1


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with the numbers of YAML 1.2 and without dates."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, form)
        for tag, form in forms
        if tag.rpartition(":")[2] not in ("int", "float", "timestamp")
    ]
    for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0o[0-7_]+|0|[1-9][0-9_]*)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    _LEADING_ZERO, re.compile(r"^[-+]?0(?:[0-7_]+|(?:_?[0-9])+)$"), list("-+0")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)|[-+]?[0-9][0-9_]*\.[0-9_]*"
        r"|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)

_LOADERS: tuple[type[_Loader], ...] = (_Loader,)
"""Loaders to try in this order; the last one's error message is reported."""

if yaml.__with_libyaml__:
    from yaml._yaml import CParser

    class _FastLoader(Composer, CParser, SafeConstructor, Resolver):  # type: ignore[misc]
        """`_Loader` with libyaml's parser, in a sixth of the time; its errors read differently."""

        yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

        def __init__(self, text: str):
            CParser.__init__(self, text)
            for part in (Composer, SafeConstructor, Resolver):
                part.__init__(self)

    _LOADERS = (_FastLoader, _Loader)  # type: ignore[assignment]


def cause(error: BaseException) -> str:
    """Type and message of `error` on one line; for an error of the system, also the remedy.

    A KeyError gives "KEY is missing", because its message is only a key.
    """
    said = " ".join(explained(error).split())[:500]
    if isinstance(error, KeyError):
        return f"{said} is missing"
    if system_number(error):
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def parse_json(
    text: str | bytes, *, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """The value of the JSON document `text`: json.loads with one kind of error for any bytes.

    `pairs` builds an object from its names and values, for callers that must see repeated names.

    Raises:
        ValueError: `text` is not JSON, is nested too deeply, or holds half of a surrogate pair,
            which no file can hold.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text))
    try:
        value = json.loads(text, object_pairs_hook=pairs)
        if "\\u" in text or _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("the JSON is nested too deeply; write fewer levels") from None
    except UnicodeEncodeError:
        raise ValueError(
            "the JSON holds half of a surrogate pair, which is not a character; remove it"
        ) from None
    return value


def has_aliases(text: bytes) -> bool:
    """Whether the YAML `text` has an alias; False if it is not YAML (its reader reports that)."""
    try:
        return any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text))
    except (yaml.YAMLError, ValueError, RecursionError):
        return False


def parse_yaml(text: str | bytes) -> Document:
    """The values in the YAML `text`, and the line of each key.

    Raises:
        YamlError: `text` is not YAML, or holds something that no configuration has.
    """
    if len(text) > MOST_BYTES:
        raise YamlError(
            f"the text is longer than {MOST_BYTES:,} bytes, which no configuration is; shorten it"
        )
    try:
        text = text.decode() if isinstance(text, bytes) else text
        for loader in _LOADERS[:-1]:
            with suppress(Exception):
                return _document(loader(text))
        return _document(_LOADERS[-1](text))
    except UnicodeDecodeError as error:
        raise YamlError(f"the text is not in UTF-8 ({error.reason}); save it as UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "the text is not YAML"
        raise YamlError(problem.splitlines()[0], mark.line + 1 if mark else None) from None
    except ReaderError as error:
        line = text[: error.position].count("\n") + 1 if isinstance(text, str) else None
        raise YamlError(
            f"the text holds the character U+{int(error.character):04X}, which YAML does not"
            " allow; take it out, and save the text as UTF-8",
            line,
        ) from None
    except yaml.YAMLError as error:
        raise YamlError(" ".join(str(error).split())) from None
    except RecursionError:
        raise YamlError(_TOO_DEEP) from None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        if isinstance(error, YamlError):
            raise
        # Errors of PyYAML's constructors where a tag such as !!int stands before another value.
        raise YamlError(
            "a value does not fit the tag before it (such as !!int), or is a number of thousands"
            " of digits; leave the tag out, or put quotes around the value"
        ) from None


def _document(loader: _Loader) -> Document:
    node = loader.get_single_node()
    if node is None:
        return Document(values=None, lines={})
    for part in _nodes(node, set()):
        _check_node(part)
    return Document(values=loader.construct_document(node), lines=dict(_lines(node)))


def parse_toml(text: bytes) -> Document:
    """The values in the TOML `text`, with dates as text and without line numbers.

    Raises:
        YamlError: `text` is not TOML, or holds something that no configuration has.
    """
    if len(text) > MOST_BYTES:
        raise YamlError(
            f"the text is longer than {MOST_BYTES:,} bytes, which no configuration is; shorten it"
        )
    try:
        # By way of JSON, which has no dates.
        values = json.loads(json.dumps(tomllib.loads(text.decode()), default=str))
    except UnicodeDecodeError as error:
        raise YamlError(f"the text is not in UTF-8 ({error.reason}); save it as UTF-8") from None
    except RecursionError:
        raise YamlError(_TOO_DEEP) from None
    except ValueError as error:
        raise YamlError(" ".join(str(error).split())) from None
    return Document(values=values, lines={})


def _nodes(
    node: yaml.Node, seen: set[int], above: frozenset[int] = frozenset()
) -> Iterator[yaml.Node]:
    """Yields `node` and all nodes in it, each once; `above` are the nodes that contain it."""
    if id(node) in above:
        raise YamlError(
            "an alias stands inside its own anchor; write its values out", node.start_mark.line + 1
        )
    if id(node) not in seen:
        seen.add(id(node))
        yield node
        for child in _children(node):
            yield from _nodes(child, seen, above | {id(node)})


def _check_node(node: yaml.Node) -> None:
    """Raises `YamlError` for a leading zero, an unknown tag, or a key repeated or not a text."""
    if node.tag == _LEADING_ZERO:
        decimal = int(node.value.replace("_", ""))
        raise YamlError(
            f"{node.value} begins with a zero, so that some programs take it for octal; write"
            f" {decimal}, or quotes around a text",
            node.start_mark.line + 1,
        )
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    if kind not in _TAGS:
        tag = node.tag if kind == node.tag else f"!!{kind}"
        raise YamlError(
            f"the tag {tag} is not supported, because no value may name a type or code to run;"
            " leave the tag out",
            node.start_mark.line + 1,
        )
    _check_keys(node)


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _check_keys(node: yaml.Node) -> None:
    """Raises `YamlError` if a mapping has a key twice, or a key that is not a text."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise YamlError("a key is a list or a mapping; write a text as key", line)
        if key.value in seen and key.value != "<<":
            raise YamlError(f"found duplicate key {key.value}; remove one of the two", line)
        seen.add(key.value)


def _lines(node: yaml.Node, prefix: str = "") -> Iterator[tuple[str, int]]:
    """(key with dots, line number) of every key in a YAML document."""
    if isinstance(node, yaml.MappingNode):
        children = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(str(index), item, item) for index, item in enumerate(node.value)]
    else:
        return
    for name, place, child in children:
        yield f"{prefix}{name}", place.start_mark.line + 1
        yield from _lines(child, f"{prefix}{name}.")
