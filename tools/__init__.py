"""Programs for developers, each started as `python -m tools.NAME`; no wheel contains them.

parity          compares two checkouts on 17 small problems, every number bit for bit, with
                parity_runs (the problems), parity_data, parity_packs and parity_results
gradient_types  which sums the gradient of each weight needs, from types of a forward pass
                (typed_passes: the pass)
check_parallel  compares a network of your own on data and context ranks with one process
                (parallel_runs: its processes)
mutate          breaks the code in small ways and lists the changes that no test sees
measure_house   figures of the tree (import_graph: import cycles and imports of higher layers;
                opened_files: what three runs open; layer_settings: fields of layers by the
                families that set them)
gpu             the plan of `make gpu`, and the wheels that it takes along
source_tree     the code as syntax trees, for these measures and for tests of the layout
docstring_form  docstrings that cannot be understood alone, as far as a linter sees it
"""
