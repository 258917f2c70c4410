"""Differences between a layout and one process, and tables of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dit.config import CUSTOM_SIZE, RunConfig
from dit.console import Console
from dit.layout_check.names import ONE, NamedLayout

if TYPE_CHECKING:
    from torch import Tensor

    from dit.layout_check.probe import Probe

# Full tensors are compared: Adam turns the rounding of a gradient near zero into a full step, so
# that single elements have a wider bound. A missing or doubled reduction shows in the change since
# the start.
BOUNDS = {
    "validation": 1e-6,
    "loss": 1e-5,
    "grad_norm": 1e-5,
    "gradient": 1e-5,
    "weight": 1e-5,
    "change": 1e-3,
    "average": 1e-5,
    "element": 1e-4,  # measured: 2e-5, where rounding makes a gradient and Adam a step of it
}
BF16_BOUNDS = {
    "validation": 5e-3,
    "loss": 5e-3,
    "grad_norm": 1e-2,
    "gradient": 5e-2,
    "weight": 2e-3,
    "change": 5e-1,
    "average": 2e-3,
    "element": 1e-1,
}
"""bfloat16 has 8 bits: sums in another order differ in the third digit (measured: 7e-4, 2e-3, 2e-2,
4e-4, 3e-1, 4e-4), while a doubled reduction is a difference of 1."""
MEANING = {
    "validation": "|a - b| / |a| before the first step, worst of all noise levels and kinds",
    "loss": "|a - b| / |a|, worst step",
    "grad_norm": "|a - b| / |a|, worst step",
    "gradient": "‖a - b‖ / ‖a‖ at step 1, worst tensor",
    "weight": "‖a - b‖ / ‖a‖ after the last step, worst tensor",
    "change": "‖a - b‖ / ‖a - start‖ after the last step, worst tensor",
    "average": "‖a - b‖ / ‖a‖ of the EMA after the last step, worst tensor",
    "element": "largest |a - b| / rms of a, of weights after the last step, worst tensor",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One layout, network and objective compared with one process."""

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
        return BF16_BOUNDS if self.bf16 else BOUNDS

    def worst(self, kind: str) -> tuple[float, str]:
        """The largest difference and its tensor."""
        if kind in self.steps:
            return self.steps[kind], ""
        return max(((d, name) for name, d in self.tensors[kind].items()), default=(0.0, ""))

    @property
    def nearest(self) -> str:
        """The difference that is closest to its bound, with its tensor."""
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


def training_name(config: RunConfig) -> str:
    """Network and objective; a network without a name is that of the recipe."""
    name, objective = config.model.name, str(config.objective.name)
    return objective if name == CUSTOM_SIZE else f"{name} {objective}"


def compare(b: Probe, a: Probe, *, layout: NamedLayout, config: RunConfig) -> Comparison:
    """Compares layout `b` of a run with one process `a`."""
    started = {name: a.weights[name] - a.start[name] for name in a.weights}
    tensors = {
        "gradient": _differences(a.gradients, b.gradients, _norms(a.gradients)),
        "weight": _differences(a.weights, b.weights, _norms(a.weights)),
        "change": _differences(a.weights, b.weights, _norms(started)),
        "average": _differences(a.averages, b.averages, _norms(a.averages)),
        "element": _differences(a.weights, b.weights, _norms(a.weights), largest=True),
    }
    return Comparison(
        layout=layout.name,
        processes=layout.size,
        training=training_name(config),
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


def _norms(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(tensor.double().norm()) for name, tensor in tensors.items()}


def _differences(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    scale: Mapping[str, float],
    *,
    largest: bool = False,
) -> dict[str, float]:
    """‖a - b‖ / scale of each tensor; infinite for NaN or a tensor that only one of them has.

    `largest` takes the largest |a - b| over the rms that has that norm instead.
    """
    found = dict.fromkeys(a.keys() | b.keys(), float("inf"))
    for name in a.keys() & b.keys():
        # Weights that nothing reads have gradients of zeros on every layout.
        gaps = a[name] - b[name]
        gap = float(gaps.abs().max() * gaps.numel() ** 0.5 if largest else gaps.double().norm())
        ratio = gap / (scale[name] or 1e-300) if gap else 0.0
        found[name] = ratio if ratio == ratio else float("inf")  # NaN exceeds no bound
    return dict(sorted(found.items()))


def _paired(a: Mapping[str, float], b: Mapping[str, float]) -> tuple[list[float], list[float]]:
    names = sorted(a.keys() | b.keys())
    return [a.get(n, float("nan")) for n in names], [b.get(n, float("nan")) for n in names]


def _worst_step(a: Sequence[float], b: Sequence[float]) -> float:
    ratios = [abs(x - y) / abs(x) for x, y in zip(a, b, strict=True)]
    return max(r if r == r else float("inf") for r in ratios)


def print_report(comparisons: Sequence[Comparison]) -> None:
    """Tables of steps, tensors and layouts; the verdicts come last."""
    console = Console()
    # Of many networks, every number would be a book: --output has them.
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
    kinds = ("gradient", "weight", "change", "average")
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
    """A row for each training that has a reference, those of a network together."""
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
