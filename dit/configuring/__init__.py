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

from dit.configuring.changes import changes
from dit.configuring.command_line import Arguments, parse_arguments
from dit.configuring.estimate import check_memory, parameter_count
from dit.configuring.loading import ConfigError, load_config, read_config, save_config, to_yaml
from dit.configuring.report import describe

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
