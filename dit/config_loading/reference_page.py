"""`docs/configuration.md`: every key with type, default, meaning and the files that set it.

python -m dit.config_loading.reference_page conf --output docs/configuration.md
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dit.command_line import OptionParser, sentences
from dit.config import ModelConfig
from dit.config.resume import RESUMED, resume_class
from dit.config_loading.load import default_config
from dit.config_loading.schema import as_typed, expected, hints, record_type, schema_of
from dit.config_loading.settings import read_file
from dit.models.registry import default_family, families, family_of_size

Files = Mapping[str, Mapping[str, Any]]
"""Name of a configuration file -> values of the dotted keys that it sets."""

_INTRODUCTION = """\
# Configuration

Every key of a run. In a YAML file it stands below its group; on the command line it is
`group.key=value`. The last column names the files of `conf/` that set it.
`python recipes/pretrain_dit.py --help=all` says the same in the terminal for the family `dit`, and
`--print-config` shows the values of a run. [Objectives](objectives.md), [launching](launching.md),
[validation](validation.md), [throughput](throughput.md) and [fine-tuning](fine_tuning.md) say what
to choose. In paths `~/` and `~user/` are expanded, and `null` stands for none. This page is made
from the code:

```bash
python -m dit.config_loading.reference_page conf --output docs/configuration.md
```

The column *resume* says what another value does to a run that
[continues](launching_reference.md#other-settings-in-the-middle-of-a-run) from a checkpoint:

"""


def files_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Name of each YAML file in `folder`, without suffix -> values of the keys that it sets."""
    return {
        path.stem: {setting.key: setting.value for setting in read_file(path).settings()}
        for path in sorted(folder.glob("*.yaml"))
    }


def reference_page(files: Files) -> str:
    """The page of all keys as Markdown; `files` holds the settings of each file in conf/."""
    defaults = default_config()
    classes = "".join(f"- `{one}`: {text}\n" for one, text in RESUMED.items())
    parts = [_INTRODUCTION + classes, *_models(files)]
    for name, kind in schema_of(defaults).groups.items():
        if name != "model":
            table = _table(kind, getattr(defaults, name), name, hints(kind), files)
            parts.append(f"## {name}\n\n{_summary(kind)}\n\n{table}")
    return "\n".join(parts)


def _models(files: Files) -> list[str]:
    """Sections of the page: the keys that all families share, then the keys of each family."""
    known = families()
    first = known[0]
    shared = [k for k in hints(first.config) if all(k in hints(one.config) for one in known)]
    parts = [
        f"## model\n\n{_summary(first.config)} Every family has these keys. Their defaults are"
        f" those of `{first.name}`; a named size (`model.name`) sets its own.\n\n"
        # Some families take fewer values of a key, and say so in a type of their own.
        + _table(ModelConfig, first.default(), "model", shared, files)
    ]
    for one in known:
        own = [key for key in hints(one.config) if key not in shared]
        sizes = ", ".join(f"`{size}`" for size in one.sizes)
        of_family = {name: set_ for name, set_ in files.items() if _family(set_) == one.name}
        table = _table(one.config, one.default(), "model", own, of_family)
        parts.append(f"### model of family {one.name}\n\nNamed sizes: {sizes}.\n\n{table}")
    return parts


def _family(values: Mapping[str, Any]) -> str:
    """The family that the settings `values` of a file name, directly or by a named size."""
    first = default_family().name
    sized = family_of_size(str(values.get("model.name")), first=first)
    return values.get("model.family") or (sized.name if sized else first)


def _summary(kind: type) -> str:
    return (inspect.getdoc(kind) or "").splitlines()[0]


def _table(kind: Any, values: object, group: str, keys: Iterable[str], files: Files) -> str:
    lines = [
        "| key | type | default | meaning | resume | set by |",
        "|---|---|---|---|---|---|",
    ]
    for key in keys:
        record = record_type(hints(kind)[key])
        default = "" if record else f"`{as_typed(getattr(values, key))}`"
        lines.append(_row(kind, key, f"{group}.{key}", default, files))
        for name in hints(record) if record else ():
            lines.append(_row(record, name, f"{group}.{key}[].{name}", "", files))
    return "\n".join([*lines, ""])


def _row(group: Any, name: str, key: str, default: str, files: Files) -> str:
    """The table row of the field `name` of `group`; `key` is its dotted key."""
    names = [name for name, keys in files.items() if key in keys]
    users = ", ".join(names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"])
    sentence, resumed = sentences(group).get(name, ""), resume_class(group, name)
    cells = (f"`{key}`", expected(hints(group)[name]), default, sentence, resumed, users)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the page of all keys to the file that the arguments `argv` name."""
    parser = OptionParser(description="Writes every key of a run as a page.")
    parser.add_argument("folder", type=Path, help="folder of YAML files that set them")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="Markdown")
    wanted = parser.parse_args(argv)
    wanted.output.write_text(reference_page(files_in(wanted.folder)))


if __name__ == "__main__":
    main()
