"""The interface that codecs and text encoders share: a name, options, settings in a card."""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Iterable, Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, ClassVar, Generic, Self, TypeVar

from dit.codecs.dataset_card import CodecError, part_of_card
from dit.codecs.pretrained import ModelLocation


class DatasetEncoder(ABC):
    """An encoder of samples: command-line options choose it, and a dataset card rebuilds it."""

    kind: ClassVar[str]  # what messages call it
    card_part: ClassVar[str]  # name of its settings in a dataset card
    subfolder: ClassVar[str]  # of a Diffusers pipeline, in which its weights lie

    name: ClassVar[str]
    options: ClassVar[frozenset[str]] = frozenset()
    """Names of the command-line options that the encoder reads."""

    @classmethod
    @abstractmethod
    def from_arguments(cls, args: Namespace) -> Self:
        """Builds the encoder that the command line in `args` asks for."""

    @classmethod
    @abstractmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        """Builds the encoder from the `settings` in a dataset card."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Everything that `from_settings` needs, as JSON values for the card."""

    @property
    def notices(self) -> tuple[str, ...]:
        """Sentences to show to the user before anything is encoded."""
        return ()

    def on(self, device: str) -> Self:
        """A copy of this encoder with its network on `device`; itself if it has no weights."""
        del device
        return self


E = TypeVar("E", bound=DatasetEncoder)


def classes_of(interface: type[E], package: ModuleType) -> list[type[E]]:
    """The classes in the files of `package` that implement `interface` and set `name` themselves.

    All files of the package are imported.
    """
    found: list[Any] = []
    for info in iter_modules(package.__path__):
        file = import_module(f"{package.__name__}.{info.name}")
        found += [
            one
            for one in vars(file).values()
            if isinstance(one, type) and issubclass(one, interface) and "name" in vars(one)
            if one.__module__ == file.__name__  # and not imported there
        ]
    return found


class Registry(dict[str, type[E]], Generic[E]):
    """Classes by their names: all codecs, all text encoders or all sound codecs."""

    def __init__(self, interface: type[E], classes: Iterable[type[E]], *, known: str):
        """Registers `classes` by their names.

        `known` introduces the list of names in the message about an unknown name.
        """
        super().__init__({cls.name: cls for cls in classes})
        self._interface, self._known = interface, known

    def named(self, name: str) -> type[E]:
        """The class that is registered as `name`.

        Raises:
            CodecError: no class has this name; the message lists all names.
        """
        if name not in self:
            kind, names = self._interface.kind, ", ".join(self)
            raise CodecError(
                f"there is no {kind} {name!r}; {self._known}: {names}. docs/families.md lists"
                " networks that cannot be trained yet, and what they need"
            )
        return self[name]

    def of_card(self, card: dict[str, Any], location: ModelLocation | None = None) -> E:
        """Builds the encoder that a dataset card describes.

        `location` says where its model is now; with None, it is where the card says.

        Raises:
            CodecError: the card names no known encoder, lacks a setting, or its model is missing.
        """
        settings = part_of_card(card, self._interface.card_part)
        moved = (location or ModelLocation()).settings(subfolder=self._interface.subfolder)
        found = self.named(str(settings.get("name")))
        try:
            return found.from_settings(settings | moved)
        except KeyError as missing:
            raise lacking(found, missing) from None


def lacking(encoder: DatasetEncoder | type[DatasetEncoder], missing: KeyError) -> CodecError:
    """The error about a dataset card without a setting that `encoder` needs."""
    return CodecError(
        f"the dataset card lacks {missing} of {encoder.kind} {encoder.name!r}; pack the data again"
    )


def unused_places(
    encoder: DatasetEncoder | type[DatasetEncoder], given: Mapping[str, str | None]
) -> list[str]:
    """Sentences about options that locate a model although `encoder` has no weights.

    `given` maps these options to their values; there is a sentence for each that has a value. The
    list is empty for an encoder with weights.
    """
    if "model_name" in encoder.options:
        return []
    why = f"{encoder.name!r}, which made the dataset, has no weights"
    return [f"{option} is not used: {why}" for option, value in given.items() if value]
