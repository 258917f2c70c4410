"""Configuration of a run: recipe, YAML file and command line become one checked `RunConfig`.

Precedence, weakest first: recipe function, `--config-file`, command line. All problems are reported
in one `ConfigError`, before any work starts. Nothing here imports torch.

    cli        `parse_arguments` of the entry scripts, `--help` and `--help=all`
    load       `load_config`, `to_yaml`, `read_config`, `changes`: the steps below in order
    settings   reads YAML and tokens as settings with their origins, merges them over a recipe, and
               resolves named sizes and interpolations
    schema     keys, types and help texts of the dataclasses; those of `model` are a family's
    validate   types, contradictions, and options that the network cannot have
    dependencies  keys that have an effect only with certain other settings
    reference_page  writes `docs/configuration.md`
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
