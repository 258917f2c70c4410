"""`docs/configuration.md` is what the code says; UPDATE_GOLDEN=1 writes it anew."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dit.config_loading.load import default_config
from dit.config_loading.reference_page import files_in, main
from dit.config_loading.schema import Schema, schema_of
from dit.models.registry import families
from tests.unit.config.test_conf_files import FILES, ROOT

PAGE = ROOT / "docs" / "configuration.md"


def test_the_page_is_current(tmp_path: Path) -> None:
    made = tmp_path / "configuration.md"
    main([str(ROOT / "conf"), "--output", str(made)])
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(made.read_text())
    assert made.read_text() == PAGE.read_text(), (
        "if the change is meant, run again with UPDATE_GOLDEN=1"
    )


def test_the_page_has_every_key_with_a_sentence() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \| (.*?) \| (.*?) \| .*\|$", PAGE.read_text(), re.M)
    sentence = {key: text for key, _, _, text in rows}
    for schema in (schema_of(default_config()), *(Schema(one.config) for one in families())):
        for key in schema.all_keys():
            assert sentence.get(key), key


def test_the_page_names_the_files_that_set_a_key() -> None:
    row = next(row for row in PAGE.read_text().splitlines() if "`optimizer.lr`" in row)
    assert "more |" in row  # most of the files
    sets = files_in(ROOT / "conf")
    assert set(sets) == set(FILES)
    assert "optimizer.lr" in sets["dit_digits"]
    # Keys of one name belong to several families, each with its own files.
    rows = [row for row in PAGE.read_text().splitlines() if "`model.max_size`" in row]
    assert [row.split(" | ")[-1] for row in rows] == [" |", "sd3_debug |"]


def test_the_page_has_the_values_that_some_families_take() -> None:
    (row,) = (row for row in PAGE.read_text().splitlines() if "`model.text_pad_to`" in row)
    assert "stored" in row.split(" | ")[1]
