"""Reads the source as syntax trees, and answers questions of tests and measurements about it.

It reads the Python files of dit/, data_prep/, recipes/, benchmarks/ and examples/, as far as they
exist, on any checkout: nothing is imported.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

TOPS = ("dit", "data_prep", "recipes", "benchmarks", "examples")
SPECIAL = ("__init__", "__main__")
MODELS = "dit/models"  # the folder of the model families
NO_FAMILY = {
    "attention",
    "diffusers",
    "joint",
    "kernels",
    "layer_spec",
    "layers",
    "lora",
    "stacks",
}  # shared
# Private members of other packages that this tree uses. A new use is added here, under its owner.
PRIVATE = {
    "argparse": {"_ActionsContainer", "_AppendAction", "_action_groups", "_actions"}
    | {"_option_string_actions"},
    "datasets": {"_fingerprint"},
    "diffusers": {"_get_byt5_prompt_embeds", "_get_mllm_prompt_embeds", "_get_prompt_embeds"}
    | {"_get_qwen3_vl_prompt_embeds", "_get_gemma_prompt_embeds", "_drop_idx"},
    "megatron.core": {"_copy_main_params_to_model_params", "_get_model_param_range_map"}
    | {"_get_cuda_rng_state", "_set_cuda_rng_state", "_results_queue", "_p2p_ops"},
    "megatron.energon": {"_worker_sample_counters", "_worker_command", "_iterator"}
    | {"_epoch_iterator", "_reading_buffer", "_fill_reading_buffer", "workers_slice_offsets"}
    | {"_get_itar_sample_pointer", "_get_itarfile_cached", "_restore_keys", "_epoch_count"}
    | {"_pending_slices_offset", "_pending_slice_indexes", "_active_slice_state"},
    "pickle": {"_Unpickler"},
    "tarfile": {"_proc_member"},
    "torch's operations on lists": {"_foreach_copy_", "_foreach_lerp_", "_foreach_mul_"}
    | {"_foreach_norm", "_foreach_sub_"},
    "torch": {"_write_item", "_StorageWriterTransforms", "_get_default_store", "_shutdown_workers"}
    | {"_backward_hooks"},
    "torch's fully_shard": {"_fsdp_param_group", "_fsdp_param_groups", "_get_fsdp_state"}
    | {"_unsharded_param", "_fsdp_param"},
}
OWNERS = {name: dependency for dependency, names in PRIVATE.items() for name in names}
DOCUMENTED = {"_exit", "_current_frames", "_dynamo"}  # of os, sys and torch: public all the same
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A Python file of the tree: its path, its text and its syntax tree."""

    path: str  # relative to the tree, with /
    text: str
    syntax: ast.Module

    @property
    def stem(self) -> str:
        return Path(self.path).stem

    @property
    def folder(self) -> str:
        return str(Path(self.path).parent)

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        return [*ast.walk(self.syntax)]

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[Any]:
        return (node for node in self._nodes if isinstance(node, kinds))


def read(tree: Path, tops: Iterable[str] = TOPS) -> list[Source]:
    """Reads the Python files in the folders `tops` of `tree`; the tests are not among them."""
    files = [file for top in tops for file in sorted((tree / top).rglob("*.py"))]
    texts = [(file.relative_to(tree).as_posix(), file.read_text()) for file in files]
    return [Source(path, text, ast.parse(text)) for path, text in texts]


def files_per_folder(sources: list[Source]) -> dict[str, int]:
    """Number of modules in each folder, without `__init__` and `__main__`."""
    return dict(sorted(Counter(s.folder for s in sources if s.stem not in SPECIAL).items()))


def unlisted(sources: list[Source]) -> dict[str, list[str]]:
    """Modules and sub-folders that the docstring of their folder does not name, by folder."""
    missing = {}
    for source in (source for source in sources if source.stem == "__init__"):
        words = set(re.findall(r"\w+", ast.get_docstring(source.syntax) or ""))
        files = {s.stem for s in sources if s.folder == source.folder} - {*SPECIAL}
        folders = {s.folder for s in sources if Path(s.folder).parent == Path(source.folder)}
        if source.folder == MODELS:  # the registry lists the families
            folders -= {*families(sources)}
        if left := (files | {Path(folder).name for folder in folders}) - words:
            missing[source.folder] = sorted(left)
    return missing


def twice(names: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names that occur at several places, with these places; `names` are pairs (name, place)."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, place in names:
        places[name].append(place)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def classes(sources: list[Source]) -> list[tuple[str, str]]:
    """(name, place) of all classes, also of those inside a class or a function."""
    return [(c.name, f"{s.path}:{c.lineno}") for s in sources for c in s.nodes(ast.ClassDef)]


def private_members(sources: list[Source]) -> dict[str, dict[str, list[str]]]:
    """Private names of dependencies that the files use, by dependency and by file.

    Names that PRIVATE does not list are under "?".
    """
    ours = {name for source in sources for name in _defined(source)}
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for source in sources:
        for name in _used(source, ours) - DOCUMENTED:
            found[OWNERS.get(name, "?")][source.path].add(name)
    return {d: {f: sorted(n) for f, n in files.items()} for d, files in sorted(found.items())}


def _defined(source: Source) -> Iterator[str]:
    for node in source.nodes(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef):
        yield node.name
    for node in source.nodes(ast.Name, ast.Attribute):
        if isinstance(node.ctx, ast.Store):
            yield _name(node)


def _used(source: Source, ours: set[str]) -> set[str]:
    """Private names of dependencies that a file uses.

    It may look them up, import or override them, or use them as keys of saved states. `ours` are
    the names that the tree itself defines.
    """
    looked_up = {node.attr for node in source.nodes(ast.Attribute)}
    foreign = [
        i for i in source.nodes(ast.ImportFrom) if (i.module or "").split(".")[0] not in TOPS
    ]
    imported = {alias.name for node in foreign for alias in node.names}
    overridden = {node.name for node in source.nodes(ast.FunctionDef)}
    keys = {node.value for node in source.nodes(ast.Constant) if isinstance(node.value, str)}
    unknown = {name for name in (looked_up - ours) | imported if re.match("_[^_]", name)}
    return unknown | (looked_up | imported | overridden | keys) & {*OWNERS}


def _name(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def families(sources: list[Source]) -> list[str]:
    """The folders of the model families: dit/models/<family>."""
    inside = {s.folder for s in sources if s.path.startswith(f"{MODELS}/")} - {MODELS}
    names = {folder.removeprefix(f"{MODELS}/").split("/")[0] for folder in inside}
    return [f"{MODELS}/{name}" for name in sorted(names - NO_FAMILY)]


def family_leaks(sources: list[Source]) -> list[str]:
    """Places where a module outside a family's folder depends on that family, as sentences."""
    folders = families(sources)
    general = [s for s in sources if not s.path.startswith(tuple(f"{f}/" for f in folders))]
    leaks = [f"{s.path}:{n}: compares a family" for s in general for n in _comparisons(s)]
    for folder in folders:
        within = [s for s in sources if s.path.startswith(f"{folder}/")]
        leaks += _leaks_of(folder, [s for s in sources if s not in within], within)
    return leaks


def _leaks_of(folder: str, outside: list[Source], within: list[Source]) -> list[str]:
    """Sentences about uses of the family in `folder` by the files `outside` of it.

    They are imports, except one by the registry, and names of the classes that the files `within`
    define.
    """
    module = folder.replace("/", ".")
    own = [s for s in outside if Path(folder).name in s.text]
    imports = [(s.folder == MODELS, f"{s.path}:{n}") for s in own for n in _imports(s, module)]
    registry = [place for is_registry, place in imports if is_registry]
    wrong = [place for is_registry, place in imports if not is_registry] + registry[1:]
    named = {name for name, _ in classes(within)}
    return [f"{place}: imports {module}" for place in wrong] + [
        f"{s.path}:{node.lineno}: names {_name(node)} of {module}"
        for s in outside
        if any(name in s.text for name in named)  # few files: walking them all takes seconds
        for node in s.nodes(ast.Name, ast.Attribute)
        if _name(node) in named
    ]


def _comparisons(source: Source) -> list[int]:
    """Lines that compare something called `family` with a text."""
    found = [
        ([n.left, *n.comparators], [*n.comparators, n.left]) for n in source.nodes(ast.Compare)
    ]
    found += [([n.subject], n.cases) for n in source.nodes(ast.Match)]
    return [
        sides[0].lineno
        for sides, others in found
        if any(_name(side) == "family" for side in sides)
        if any(isinstance(getattr(n, "value", 0), str) for o in others for n in ast.walk(o))
    ]


def _imports(source: Source, module: str) -> list[int]:
    """Lines that import `module` or a name in it, by a statement or by a string."""
    lines, inside = set(), re.compile(rf"{re.escape(module)}(?:[.:]\w|$)")
    for node in source.nodes(ast.Import, ast.ImportFrom, ast.Constant):
        names = [str(getattr(node, "value", "")), str(getattr(node, "module", ""))]
        names += [alias.name for alias in getattr(node, "names", ())]
        names += [f"{names[1]}.{name}" for name in names[2:]]
        if any(name.startswith(module) and inside.match(name) for name in names):
            lines.add(node.lineno)
    return sorted(lines)
