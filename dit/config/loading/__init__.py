"""From recipe, YAML file and command line to one checked `RunConfig`, and what it amounts to.

Precedence, weakest first: recipe function, `--config-file`, command line. Everything that is wrong
is one `ConfigError`, raised before any work starts. Nothing here imports torch.

    settings      YAML and tokens -> settings, each with its place
    foreign       keys of other stacks: what each is read as, or why it is not used
    merging       settings over a recipe; named sizes; interpolation
    checking      types and contradictions
    loading       the four together: `load_config`, `to_yaml`, `read_config`
    command_line  `parse_arguments` of the entry scripts, and `--help`
    schema        keys, types and sentences of `dit.config`
    estimate      parameters and memory
    report        `describe`: what `--print-config` prints
    changes       what differs between two configurations, in words
"""

from dit.config.loading.cli import Arguments, parse_arguments
from dit.config.loading.describe import describe
from dit.config.loading.diff import changes
from dit.config.loading.load import ConfigError, load_config, read_config, save_config, to_yaml
from dit.models.dit.size import check_memory, parameter_count

__all__ = [
    "Arguments",
    "ConfigError",
    "changes",
    "check_memory",
    "describe",
    "load_config",
    "parameter_count",
    "parse_arguments",
    "read_config",
    "save_config",
    "to_yaml",
]
