"""The first run on a GPU: what `first_gpu.py` measures, part after part, and writes down.

parts       the table of parts in their order of worth, with their limits and configurations
install     wheels -> a folder that this run's processes see, and torch stays the machine's
schedule    which parts still fit into the time; what is finished is on disk at once
worker      the process in which parts run; it is started again where one has crashed
checks      whether every module that the parts need can be imported, and tests/gpu
bounds      measured bounds: products, copies, attention by kernel, fused kernels
steps       configurations of a shape -> measured steps, and kernels by their time
expected    what the planner expects of the same steps, by kind of cost
page        results -> Markdown
"""
