"""From recipe, YAML file and command line to one checked `RunConfig`, and what it amounts to.

Precedence, weakest first: recipe function, `--config-file`, command line. Everything that is wrong
is one `ConfigError`, raised before any work starts. Nothing here imports torch.

    cli        `parse_arguments` of the entry scripts, `--help` and `--help=all`
    load       `load_config`, `to_yaml`, `read_config`, `changes`: the steps below together
    settings   YAML and tokens -> settings, each with its place, laid over a recipe; named sizes;
               interpolation
    schema     keys, types and sentences of the dataclasses; those of `model` are a family's
    validate   types, contradictions, what a network refuses of its run
    dependencies  keys that have an effect beside certain settings alone, as Muon's beside Muon
    reference_page  `docs/configuration.md`; likewise
"""

from dit.config_loading.load import (
    ConfigError,
    changes,
    default_config,
    load_config,
    read_config,
    save_config,
    to_yaml,
)
