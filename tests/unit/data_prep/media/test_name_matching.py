"""A file belongs to a medium by its bytes, else by its composed name, else it is counted."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from data_prep.media.name_matching import composed, match

E, DECOMPOSED = "caf\u00e9", "cafe\u0301"
# Three spellings of one letter: Å of Ångström, Å, and A with a ring.
RINGS = ("\u212b", "\u00c5", "A\u030a")
names = st.lists(
    st.sampled_from(["a", E, DECOMPOSED, *RINGS, "\uac00", "\u1100\u1161"]), max_size=6
)


def matched(offered: list[str], wanted: list[str]):
    return match({name: f"file {name}" for name in offered}, lambda: ([name] for name in wanted))


def test_bytes_come_first_and_only_what_is_left_is_composed() -> None:
    assert matched([E], [DECOMPOSED]).by_name == {DECOMPOSED: f"file {E}"}
    assert matched([DECOMPOSED], [E]).by_name == {E: f"file {DECOMPOSED}"}
    both = matched([E, DECOMPOSED], [DECOMPOSED])
    assert both.by_name[DECOMPOSED] == f"file {DECOMPOSED}" and both.spare == [f"file {E}"]
    taken = matched([E], [E, DECOMPOSED])  # it is no caption of the second, too
    assert taken.by_name == {E: f"file {E}"} and not taken.spare


def test_a_name_that_stands_for_several_is_left_alone() -> None:
    for offered, wanted in ((RINGS[:1], RINGS[1:]), (RINGS[1:], RINGS[:1])):
        found = matched(list(offered), list(wanted))
        assert found.by_name.keys() == set(offered) and not found.spare
        assert len(found.unclear) == len(offered)


def test_the_first_of_several_names_of_a_medium_is_taken() -> None:
    files = {f"{E}.png.txt": 1, f"{E}.txt": 2}
    found = match(files, lambda: ([f"{DECOMPOSED}.png.txt", f"{DECOMPOSED}.txt"],))
    assert found.by_name == {f"{DECOMPOSED}.png.txt": 1, f"{E}.txt": 2} and found.spare == [2]


@given(offered=names, wanted=names)
def test_every_file_belongs_to_one_spelling_or_is_counted(
    offered: list[str], wanted: list[str]
) -> None:
    found = matched(offered, wanted)
    assert sorted(found.by_name.values()) == sorted({f"file {name}" for name in offered})
    used = {file for name, file in found.by_name.items() if name in wanted}
    assert used.isdisjoint(found.spare) and used.isdisjoint(found.unclear)
    assert used | set(found.spare) | set(found.unclear) == set(found.by_name.values())
    for name, file in found.by_name.items():
        assert composed(name) == composed(file.removeprefix("file "))
        assert name not in offered or file == f"file {name}"
    lost = [unicodedata.normalize("NFC", w) for w in wanted if w not in found.by_name]
    assert not any(composed(file.removeprefix("file ")) in lost for file in found.spare)
