"""Small trees with known faults: what the tests of the map say of them."""

from __future__ import annotations

import textwrap
from pathlib import Path

from tools.docstring_form import docstring_faults
from tools.import_graph import arrows, circles, late_imports
from tools.measure_house import with_legends
from tools.source_tree import (
    classes,
    family_leaks,
    files_per_folder,
    private_members,
    read,
    twice,
    unlisted,
)


def write(tree: Path, **texts: str) -> None:
    """Files by their path, with __ for /."""
    for name, text in texts.items():
        file = tree / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def page(tree: Path, folder: str, text: str) -> None:
    (tree / folder).mkdir(parents=True, exist_ok=True)
    (tree / folder / "__init__.py").write_text(f'"""{text}"""\n')


def test_a_page_lists_files_and_folders_by_whole_words(tmp_path):
    page(tmp_path, "dit", "first.py opens the rest; inner_ring")
    page(tmp_path, "dit/inner", "What goes round.")
    write(tmp_path, dit__first="", dit__ring="", dit__inner__deep="", tests__other="")
    sources = read(tmp_path)
    assert unlisted(sources) == {"dit": ["inner", "ring"], "dit/inner": ["deep"]}
    assert files_per_folder(sources) == {"dit": 2, "dit/inner": 1}


def test_classes_of_one_name_are_found_at_any_depth(tmp_path):
    write(
        tmp_path,
        dit__one="class A:\n    class B: ...\n",
        recipes__two="def f():\n    class B: ...\n",
    )
    assert twice(classes(read(tmp_path))) == {"B": ["dit/one.py:2", "recipes/two.py:2"]}


def test_private_members_are_those_of_others(tmp_path):
    write(
        tmp_path,
        dit__ours="class A:\n    def _own(self): self._kept = 1\n\n\nA()._own()\n",
        dit__theirs="from torch import _new\nx._shutdown_workers()\nx.__dict__, x._kept, x._odd\n",
        dit__overrides="class B(D):\n    def _fill_reading_buffer(self): ...\n",
        dit__state="state['_epoch_count'], '_no_key', os._exit(1)\n",
    )
    assert private_members(read(tmp_path)) == {
        "?": {"dit/theirs.py": ["_new", "_odd"]},
        "megatron.energon": {
            "dit/overrides.py": ["_fill_reading_buffer"],
            "dit/state.py": ["_epoch_count"],
        },
        "torch": {"dit/theirs.py": ["_shutdown_workers"]},
    }


def test_a_family_is_known_in_its_folder_and_by_one_line(tmp_path):
    write(
        tmp_path,
        dit__models__layers__rope="class Rope: ...\n",
        dit__models__toy__model="class Toy: ...\n\n\nToy() if config.family == 'toy' else None\n",
        dit__models__family="NAMES = {'toy': 'dit.models.toy.model:Toy'}\nimport dit.models.toy\n",
        dit__train="from dit.models.layers import rope\nfrom dit.models import toy\n"
        "toy.model.Toy, rope.Rope\n"
        "a.family == b.family, a.name == 'toy', f(family='toy')\n"
        "a.model.family in ('toy', 'other')\n"
        "match a.family:\n    case 'toy': ...\n",
        tests__free="from dit.models.toy.model import Toy\n",
    )
    assert family_leaks(read(tmp_path)) == [
        "dit/train.py:5: compares a family",
        "dit/train.py:6: compares a family",
        "dit/train.py:2: imports dit.models.toy",
        "dit/models/family.py:2: imports dit.models.toy",
        "dit/train.py:3: names Toy of dit.models.toy",
    ]


def test_circles_go_through_late_imports_and_past_names_that_are_passed_on(tmp_path):
    write(
        tmp_path,
        dit__top="from dit.a import Low\n",
        dit__d="from dit.top import Low\n\nx = 1\n",  # passed on twice: it is of dit.a.low
        dit__a__low="class Low: ...\n",
        dit__a__high="from dit.a import Low\n\n\ndef f():\n    from dit.b import g\n",
        dit__b="if TYPE_CHECKING:\n    from dit.a import high\n",
        benchmarks__late="def f():\n    import dit.b\n",
    )
    passes_on = "from dit.a.low import Low\nfrom dit.d import x\n"
    (tmp_path / "dit/a/__init__.py").write_text(passes_on)
    sources = read(tmp_path)
    assert circles(sources) == [["dit.a.high", "dit.b"]]
    assert late_imports(sources) == 1


def test_arrows_against_the_order_and_the_floors_that_excuse_them(tmp_path):
    """dit.train may read dit.convert.files, which has a floor of its own; data does so by order."""
    order = """
    from pathlib import Path

    OURS = ("dit",)
    SPLIT = {"dit.convert.files"}
    ALLOWED = {"dit.train": {"dit.convert.files", "dit.data"}, "dit.convert": {"dit.train"}}
    part_of = lambda name: name if name in SPLIT else ".".join(name.split(".")[:2])

    def sources(root):
        return [("dit.train", Path()), ("dit.convert.files", Path()), ("dit.data", Path())]

    def imports_of(file):
        return ["dit.convert.files", "dit.data", "torch"]
    """
    test = tmp_path / "tests/unit/test_import_directions.py"
    test.parent.mkdir(parents=True)
    test.write_text(textwrap.dedent(order))
    found, excuses = arrows(tmp_path)
    assert found["dit.train -> dit.convert"] == ["dit.train imports dit.convert.files"]
    assert "dit.convert -> dit.data" not in found
    assert excuses == ["dit.convert.files"]


def test_shapes_are_told_by_names_and_by_legends(tmp_path):
    write(
        tmp_path,
        dit__plain="def f(x: Tensor, level_N: Tensor, n: int): ...\n",
        dit__own='def g(x: Tensor):\n    """Of x [T, D]."""\n',
        dit__legend='class A:\n    """Rows [N, 3]."""\n\n    def h(self, x: Tensor): ...\n',
    )
    told = {place.split(" ")[1]: is_told for place, is_told in with_legends(read(tmp_path))}
    assert told == {"f(x)": False, "f(level_N)": True, "g(x)": True, "h(x)": True}


def test_docstrings_that_lean_on_others_are_found(tmp_path):
    text = '''
        """Samples of shards: a module."""
        class Pack:
            """Tokens."""
            width: int
            """Of each token."""
            count: int
            """Number of them."""
            def rows(self, share_of):
                """Where the share begins."""
            def stops(self, share):
                """Where they end, in tokens."""
            def _ends(self, share):
                """Where they end, in tokens."""
        def made(pack):
            """Training loss of a sample."""
            def inner(share):
                """Drawn again for each."""
    '''
    write(tmp_path, dit__pack=textwrap.dedent(text))
    found = docstring_faults(read(tmp_path))
    assert [(one.line, one.why.partition(":")[0]) for one in found.pop("dit/pack.py")] == [
        (4, "has fewer than three words in its first paragraph"),
        (6, "begins with no subject of its own"),
        (12, "names neither an argument nor a result"),
        (18, "begins with no subject of its own"),
    ]
    assert not found
