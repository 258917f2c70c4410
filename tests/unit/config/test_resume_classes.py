"""Each key has a class that says what another value does to a run that continues."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

import pytest

from dit.config import ModelConfig
from dit.config.resume import RESUMED, Live, Refused, Resume, resume_class, resume_classes
from dit.config_loading.load import default_config
from dit.config_loading.schema import Schema, hints, record_type, schema_of
from dit.models.registry import families
from tests.odd_family import OddConfig
from tests.toy_family import ToyConfig
from tests.unit.config.test_reference_page import PAGE

MODELS = [*(one.config for one in families()), ToyConfig, OddConfig]


@pytest.mark.parametrize("model", MODELS)
def test_every_key_has_a_class(model):
    """A family's own key without a class is refused at a resume: it decides what weights mean."""
    groups = Schema(model).groups
    for group, kind in groups.items():
        own = set(hints(kind)) - set(hints(ModelConfig)) if group == "model" else set()
        assert set(hints(kind)) - own == set(resume_classes(kind)) - own, group
        for name, inner in hints(kind).items():
            if record := record_type(inner):
                assert set(hints(record)) == set(resume_classes(record)), f"{group}.{name}"


def test_few_keys_are_read_at_the_start_alone():
    schema = schema_of(default_config())
    names = [key for key in schema.all_keys() if schema.resume_class(key) is Resume.AT_START]
    assert "checkpoint.finetune" in names and len(names) <= 20


@dataclass
class _Base:
    one: Live[int] = 0
    two: Live[int] = 0
    three: Annotated[int, "a mark of another tool"] = 0


@dataclass
class _Below(_Base):
    one: Refused[int] = 1
    two: int = 1


def test_a_field_that_is_declared_anew_keeps_its_class_and_one_without_is_refused():
    assert resume_classes(_Below) == {"one": Resume.REFUSED, "two": Resume.LIVE}
    assert resume_class(_Below, "three") is Resume.REFUSED
    assert hints(_Below) == dict.fromkeys(("one", "two", "three"), int)


def test_the_page_shows_the_class_of_each_key():
    rows = re.findall(r"^\| `([\w.\[\]]+)` \|.* \| ([\w ]+) \| [^|]*\|$", PAGE.read_text(), re.M)
    assert {shown for _, shown in rows} == set(RESUMED)
    shown = dict(rows)
    for model in (one.config for one in families()):
        schema = Schema(model)
        for key in schema.all_keys():
            assert shown[key] == schema.resume_class(key), key
    assert shown["dataset.blend[].weight"] == Resume.OF_DATA
    assert all(f"- `{one}`: {text}" in PAGE.read_text() for one, text in RESUMED.items())
