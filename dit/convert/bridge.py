"""This project's networks for NVIDIA's Megatron-Bridge.

    register()
    source = DiffusersSource(Path("wan/transformer"))
    bridge = get_model_bridge("WanTransformer3DModel")
    provider = bridge.provider_bridge(source)
    provider.tensor_model_parallel_size = 2
    provider.finalize()
    chunks = provider.provide_distributed_model(wrap_with_ddp=False)
    bridge.load_weights_hf_to_megatron(source, chunks)
    exported = dict(bridge.stream_weights_megatron_to_hf(chunks, source))

It needs the extra `bridge`, which needs CUDA. `DiffusersSource` exists because Megatron-Bridge's
`AutoBridge` reads no Diffusers models. Its conversions only warn about unknown names; `python -m
dit.convert` needs none of this, and is strict.
"""

# pyright: reportMissingImports=false
# Few machines can install megatron-bridge: its dependencies are CUDA sources.

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    ColumnParallelMapping,
    MegatronParamMapping,
    ReplicatedMapping,
    RowParallelMapping,
)
from megatron.bridge.models.hf_pretrained.state import StateDict, StateSource
from megatron.bridge.models.model_provider import ModelProviderMixin
from megatron.bridge.models.transformer_config import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig as CoreConfig
from torch import Tensor

from dit.config import ModelConfig, Precision, TextPadding
from dit.convert.diffusers_checkpoint import CONFIG, DiffusersFolder, open_folder
from dit.convert.diffusers_config import Unsaid, model_config
from dit.convert.errors import ConvertError
from dit.distributed.process_groups import device, process_groups
from dit.models.diffusers.names import Pair, TensorSplit
from dit.models.layers.parallel_linear import transformer_config
from dit.models.registry import (
    default_family,
    diffusers_classes,
    diffusers_form,
    family_named,
    family_of,
    pairs,
)
from dit.train.model_and_optimizer import initialise


class _Row(RowParallelMapping):
    """A mapping that scatters contiguous copies, because gloo ignores strides."""

    def scatter_to_tp_ranks(self, splits: Any, *args: Any, **options: Any) -> Tensor:
        own = None if splits is None else [part.contiguous() for part in splits]
        return super().scatter_to_tp_ranks(own, *args, **options)


_SHARED = {
    TensorSplit.ROW: _Row,
    TensorSplit.REPLICATED: ReplicatedMapping,
    TensorSplit.COLUMN: ColumnParallelMapping,
}
"""How tensor-parallel ranks divide a tensor -> Megatron-Bridge's mapping for it."""


class PairMapping(MegatronParamMapping):
    """Megatron-Bridge's mapping for one line of the name table, in one layer."""

    def __init__(self, pair: Pair):
        names = {str(number): name for number, name in enumerate(pair.theirs)}
        super().__init__(_name(pair), names if len(names) > 1 else pair.theirs[0])
        self.pair = pair
        shared = _SHARED[pair.split_over]
        self.shared = shared(self.megatron_param, self.megatron_param)

    def resolve(self, captures: tuple[str, ...]) -> PairMapping:  # noqa: ARG002 - no pattern left
        return self

    def hf_to_megatron(self, hf_weights: Any, megatron_module: torch.nn.Module) -> Tensor:
        parts = list(hf_weights.values()) if isinstance(hf_weights, dict) else [hf_weights]
        return self.shared.hf_to_megatron(self.pair.join(parts), megatron_module)

    def megatron_to_hf(
        self, megatron_weights: Tensor | None, megatron_module: torch.nn.Module | None
    ) -> dict[str, Tensor]:
        whole = self.shared.megatron_to_hf(megatron_weights, megatron_module)
        parts = [part for tensor in whole.values() for part in self.pair.split(tensor)]
        return {
            name: part.contiguous()
            for name, part in zip(self.pair.theirs, parts, strict=bool(parts))
        }


def _name(pair: Pair) -> str:
    """Name of the parameter in Megatron-Bridge, with the number of its layer."""
    return pair.ours.replace("layers.", f"layers.{pair.layer}.", 1)


class _Source(StateSource):
    """The tensors of a Diffusers folder, as Megatron-Bridge reads them."""

    def __init__(self, folder: DiffusersFolder):
        self.folder = folder

    def get_all_keys(self) -> list[str]:
        return sorted(self.folder.headers)

    def load_tensors(self, keys: list[str]) -> dict[str, Tensor]:
        return {key: self.folder.read(key) for key in keys}


class DiffusersSource:
    """A Diffusers folder in the form that Megatron-Bridge expects of a pretrained model."""

    def __init__(
        self, path: Path, *, text_pad_to: int | TextPadding | Unsaid | None = Unsaid.UNSAID
    ):
        """Opens the Diffusers folder `path`; `text_pad_to` is as in `import_weights`.

        Raises:
            ConvertError: the folder holds another model, or not the tensors of config.json.
        """
        self.folder = folder = open_folder(path)
        whole = any(header.dtype is not torch.bfloat16 for header in folder.headers.values())
        self.config = model_config(
            folder.config,
            precision=Precision.FP32 if whole else Precision.BF16,
            text_pad_to=text_pad_to,
            second=folder.companion_config,
            place=folder.path / CONFIG,
        )
        if (second := diffusers_form(self.config).companion_of(self.config)) is not None:
            raise ConvertError(
                f"{path}: this network lies in two folders ({path.name} and {second.folder}), and"
                " Megatron-Bridge reads one of them; use `python -m dit.convert import`"
            )
        folder.check(pairs(self.config))
        self.state = StateDict(_Source(folder))
        self.model_name_or_path = str(path)


@dataclass
class NetworkProvider(TransformerConfig, ModelProviderMixin):
    """Builds a network with the layout and precision that Megatron-Bridge sets in its fields."""

    network: ModelConfig = field(default_factory=default_family().default)
    seed: int = 1234
    """The seed of the initial weights."""

    @classmethod
    def of(cls, model: ModelConfig) -> NetworkProvider:
        made = transformer_config(model)
        known = {f.name: getattr(made, f.name) for f in fields(CoreConfig) if f.init}
        return cls(**known, network=model)

    def configured(self) -> ModelConfig:
        """The configuration of the network, with layout and precision as the fields are now."""
        return replace(
            self.network,
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            sequence_parallel=self.sequence_parallel,
            context_parallel_size=self.context_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=self.virtual_pipeline_model_parallel_size,
            precision=Precision.BF16 if self.bf16 else Precision.FP32,
        )

    def finalize(self) -> None:
        """Checks the fields against each other.

        Raises:
            Problems: fields contradict each other.
        """
        self.configured()
        super().finalize()

    def provide(
        self,
        pre_process: bool | None = None,  # noqa: ARG002 - networks ask their groups
        post_process: bool | None = None,  # noqa: ARG002
        vp_stage: int | None = None,
    ) -> MegatronModule:
        family = family_of(self.network)
        model = family.network()(self.configured(), process_groups(), vp_stage)
        if not next(model.parameters()).is_meta:
            model.to(device())
            rules = family.weights
            initialise(
                model,
                seed=self.seed,
                std=self.network.init_method_std,
                method=self.network.init_method,
                zero=rules.starts_at_zero,
                chosen=lambda name: name not in rules.fixed,
            )
        return model

    def provide_distributed_model(self, *args: Any, **options: Any) -> list[MegatronModule]:
        # The default wrapper rounds all inputs to bf16, noise levels and positions included.
        return super().provide_distributed_model(
            *args, **({"mixed_precision_wrapper": None} | options)
        )


class NetworkBridge(MegatronModelBridge):
    """Megatron-Bridge's bridge from a Diffusers network to ours, by the family's name table."""

    hf_config: ModelConfig  # of the source; Megatron-Bridge sets it where it makes the bridge

    def provider_bridge(self, hf_pretrained: DiffusersSource) -> NetworkProvider:
        self.hf_config = hf_pretrained.config
        return NetworkProvider.of(hf_pretrained.config)

    def mapping_registry(self) -> MegatronMappingRegistry:
        return MegatronMappingRegistry(*(PairMapping(pair) for pair in pairs(self.hf_config)))


def register() -> None:
    """Registers a bridge for each network class of Diffusers; it may be called again.

    Megatron-Bridge identifies bridges by their class, so each Diffusers class has one of its own.
    """
    for theirs, family in diffusers_classes().items():
        network: Any = family_named(family).network()
        made = type(f"{theirs}Bridge", (NetworkBridge,), {})
        MegatronModelBridge.register_bridge(
            source=theirs, target=network, provider=NetworkProvider
        )(made)
