"""The commands a person types: pretrain, generate, evaluate, report.

Each file is a script (`python recipes/NAME.py --help`) and, installed, a module
(`python -m recipes.NAME`). The YAML files they start from lie in `conf/`.
"""
