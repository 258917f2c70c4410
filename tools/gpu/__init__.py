"""Measures on a GPU: `make gpu` runs the rows of a plan and writes their results.

plan        rows, the most useful first, with their durations and configurations
worker      the process in which rows run; it is started again after a crash
checks      whether every module that the rows need can be imported, and tests by name
steps       what rows measure: bounds, steps of a shape, their kernels, a padded loop
page        results -> Markdown
wheelhouse  wheels that a machine without internet lacks: `make wheelhouse`, and their installation

**Wheels.** pip resolves them under the Python version of the other machine, in an environment whose
metadata claim the packages of PRESENT, which `pip list --format=freeze` prints on it. A package of
that machine stays if its version satisfies everything; torch, Triton and CUDA are never fetched,
and a list that would need them is an error. No wheel needs a newer C library than glibc 2.28.
nvidia-cudnn-frontend is fetched without the compilers that it declares, and S3 packages that no run
imports are not fetched. More than 45 MB are refused (`--limit-mb`), since copying to such machines
is often limited: for the list in benchmarks/machines there are 36 wheels of 36.3 MB.
`PIP_FLAGS="--also flash-attn-4 --limit-mb 150"` adds FlashAttention 4 and the compilers of its
kernels, 102 MB; other PIP_FLAGS are pip's own. On the GPU machine they are installed in
runs/gpu/site, which only the processes of a run see.

**Limits.** A row begins only if as many seconds of LIMIT are left as it is expected to take, and is
ended after three times as many and a minute. Its results until then are kept: lines of a table,
tests. Nothing runs after a smoke test that fails. PARTS names rows; `missing` names those without a
result. KEYS sets keys of all configurations; all rows of a shape take as many quarters of its pack
as the one that needs most memory has memory for. OUTPUT is the folder of the results, such as one
that is copied back from a rented machine, and the variable COMMIT names the commit where there is
no git.
"""
