"""Differences between a layout and one process, and tables of the differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dit.config import CUSTOM_SIZE, ModelConfig, ObjectiveConfig, RunConfig
from dit.console import Console
from dit.layout_check.names import ONE, NamedLayout

if TYPE_CHECKING:
    from torch import Tensor

    from dit.layout_check.probe import Probe

BOUNDS = {
    "validation": 1e-6,
    "loss": 1e-5,
    "grad_norm": 1e-5,
    "gradient": 5e-4,  # measured: 3e-5, and 9e-5 with kernels of a processor without AVX
    "weight": 1.0,
    "average": 1.0,
}
BF16_BOUNDS = {**BOUNDS, "validation": 5e-3, "loss": 5e-3, "grad_norm": 1e-2, "gradient": 1e-1}
"""bfloat16 has 8 bits: sums in another order differ in the third digit (measured: 7e-4, 2e-3,
1e-2), and single elements much more, so that norms are compared. A sum that is wrongly doubled
differs by at least 0.5."""


def bounds_of(*, bf16: bool) -> Mapping[str, float]:
    """The largest allowed difference of each kind, in bfloat16 or in float32."""
    return BF16_BOUNDS if bf16 else BOUNDS


MEANING = {
    "validation": "|a - b| / |a| before the first step, worst of all noise levels and kinds",
    "loss": "|a - b| / |a|, worst step",
    "grad_norm": "|a - b| / |a|, worst step",
    "gradient": "|a - b| / (|a| + rms of its tensor) at step 1, worst element (bf16: of norms)",
    "weight": "|a - b| after the last step / the change that rounding of gradients can make in that"
    " element, worst element (bf16: of norms)",
    "average": "the same of the EMA after the last step",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Differences between a layout and one process, for one network and objective."""

    layout: str
    processes: int
    training: str  # what `training_name` calls it
    network: str  # `model.name`
    objective: str
    bf16: bool
    losses: list[float]
    grad_norms: list[float]
    tensors: dict[str, dict[str, float]]  # kind -> name -> difference
    steps: dict[str, float]  # kind -> worst difference of a step, or of a validation loss
    torn: list[str]  # weights whose copies are not bit-identical
    thawed: list[str]  # frozen weights that a step has changed

    @property
    def bounds(self) -> Mapping[str, float]:
        return bounds_of(bf16=self.bf16)

    def worst(self, kind: str) -> tuple[float, str]:
        """The largest difference of this `kind`, and the name of its tensor (empty for steps)."""
        if kind in self.steps:
            return self.steps[kind], ""
        return max(((d, name) for name, d in self.tensors[kind].items()), default=(0.0, ""))

    @property
    def nearest(self) -> str:
        """Text on the largest difference in relation to its bound: percentage, kind and tensor."""
        part, kind = max((self.worst(kind)[0] / bound, kind) for kind, bound in self.bounds.items())
        return f"{part:.0%} of {kind} {self.worst(kind)[1]}"

    @property
    def faults(self) -> list[str]:
        found = []
        for kind, bound in self.bounds.items():
            difference, name = self.worst(kind)
            if not difference <= bound:
                found.append(f"{kind} {name + ' ' if name else ''}{difference:.1e} > {bound:g}")
        found += [f"replicas of {name} differ" for name in self.torn[:1]]
        return found + [f"{name} is frozen and has changed" for name in self.thawed[:1]]

    @property
    def good(self) -> bool:
        return not self.faults

    @property
    def verdict(self) -> str:
        return "same" if self.good else "; ".join(self.faults)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"bounds": dict(self.bounds), "faults": self.faults}


def training_name(model: ModelConfig, objective: ObjectiveConfig) -> str:
    """Name of a training in reports: network and objective, or the objective for `CUSTOM_SIZE`."""
    name, learned = model.name, str(objective.name)
    return learned if name == CUSTOM_SIZE else f"{name} {learned}"


def compare(b: Probe, a: Probe, *, layout: NamedLayout, config: RunConfig) -> Comparison:
    """Compares the record `b` of a run on `layout` with the record `a` of one process."""
    from dit.layout_check.rounding import gradient_sizes

    sizes = dict(zip(a.gradients, gradient_sizes([*a.gradients.values()]), strict=True))
    tensors = {
        "gradient": _differences(a.gradients, b.gradients, sizes, norms=layout.bf16),
        "weight": _differences(a.weights, b.weights, a.reach, norms=layout.bf16),
        "average": _differences(a.averages, b.averages, a.reach, norms=layout.bf16),
    }
    return Comparison(
        layout=layout.name,
        processes=layout.size,
        training=training_name(config.model, config.objective),
        network=config.model.name,
        objective=config.objective.name,
        bf16=layout.bf16,
        losses=b.losses,
        grad_norms=b.grad_norms,
        tensors=tensors,
        steps={
            "validation": _worst_step(*_paired(a.validation, b.validation)),
            "loss": _worst_step(a.losses, b.losses),
            "grad_norm": _worst_step(a.grad_norms, b.grad_norms),
        },
        torn=b.torn,
        thawed=b.thawed,
    )


def _differences(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    scale: Mapping[str, Tensor],
    *,
    norms: bool,
) -> dict[str, float]:
    """Largest |a - b| / scale of each tensor; infinite for NaN, or if one mapping lacks it.

    `scale` has a number for each element. `norms` takes ‖a - b‖ / ‖scale‖ instead.
    """
    found = dict.fromkeys(a.keys() | b.keys(), float("inf"))
    for name in a.keys() & b.keys():
        gaps, sizes = (a[name].double() - b[name].double()).abs(), scale[name].double()
        if norms:
            gaps, sizes = gaps.norm(), sizes.norm()
        # Weights that nothing reads have gradients of zeros on every layout.
        ratio = float((gaps / sizes).masked_fill(gaps == 0, 0.0).max())
        found[name] = ratio if ratio == ratio else float("inf")  # NaN exceeds no bound
    return dict(sorted(found.items()))


def _paired(a: Mapping[str, float], b: Mapping[str, float]) -> tuple[list[float], list[float]]:
    names = sorted(a.keys() | b.keys())
    return [a.get(n, float("nan")) for n in names], [b.get(n, float("nan")) for n in names]


def _worst_step(a: Sequence[float], b: Sequence[float]) -> float:
    ratios = [abs(x - y) / abs(x) for x, y in zip(a, b, strict=True)]
    return max(r if r == r else float("inf") for r in ratios)


def print_report(comparisons: Sequence[Comparison]) -> None:
    """Prints a table of layouts, the meaning of each kind of difference, and verdicts of failures.

    If all comparisons are of one network, tables of its steps and tensors come first.
    """
    console = Console()
    # With several networks the tables would be too long: --output has every number.
    if len({c.network for c in comparisons}) == 1:
        for objective in dict.fromkeys(c.objective for c in comparisons):
            mine = [c for c in comparisons if c.objective == objective]
            console.print(_steps(mine, objective))
            console.print(_tensors([c for c in mine if not c.bf16], objective))
    console.print(_layouts(comparisons))
    for kind, text in MEANING.items():
        bounds = f"{BOUNDS[kind]:g} (bf16 {BF16_BOUNDS[kind]:g})"
        console.print(f"{kind:<11}{text}; at most {bounds}")
    failed = [c for c in comparisons if not c.good]
    for c in failed:
        console.print(f"{c.layout} {c.training}: {c.verdict}")
    same = len(comparisons) - len(failed)
    console.print(f"{same} of {len(comparisons)} trainings agree with one process")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column != "layout" else "left")
    return table


def _steps(comparisons: Sequence[Comparison], objective: str) -> Table:
    count = len(comparisons[0].losses)
    numbers = [f"{what} {step}" for what in ("loss", "norm") for step in range(1, count + 1)]
    table = _table(f"{objective}: loss and gradient norm at each step", "layout", *numbers)
    for c in comparisons:
        table.add_row(c.layout, *(f"{x:.7g}" for x in (*c.losses, *c.grad_norms)))
    return table


def _tensors(comparisons: Sequence[Comparison], objective: str) -> Table:
    kinds = ("gradient", "weight", "average")
    title = f"{objective}: largest difference of each tensor, and the layout that has it"
    table = Table(title=title, title_justify="left")
    for column in ("tensor", *kinds):
        table.add_column(column)
    for name in sorted({n for c in comparisons for n in c.tensors["weight"]}):
        row = [
            max((c.tensors[kind].get(name, 0.0), c.layout) for c in comparisons) for kind in kinds
        ]
        table.add_row(name, *(f"{d:.1e} {layout}" for d, layout in row))
    return table


def _layouts(comparisons: Sequence[Comparison]) -> Table:
    """A table with a row for each comparison except references, ordered by network."""
    networks = list(dict.fromkeys(c.network for c in comparisons))
    ends = ("replicas", "nearest to its bound", "verdict")
    table = _table("Layouts beside one process", "layout", "network", "objective", *BOUNDS, *ends)
    compared = [c for c in comparisons if not c.layout.startswith(ONE)]
    for c in sorted(compared, key=lambda c: networks.index(c.network)):
        table.add_row(
            c.layout,
            c.network,
            c.objective,
            *(f"{c.worst(kind)[0]:.1e}" for kind in BOUNDS),
            "differ" if c.torn else "identical",
            c.nearest,
            "same" if c.good else "DIFFERENT",
        )
    return table
