"""A page to try prompts on: `python -m dit.playground CKPT`, for this machine alone.

requests  what the page asks for -> checked options
studio    open checkpoints, with and without adapters -> pictures, and the way to them
server    the page and its answers over HTTP; page.html is all of the page

The server is that of the standard library: one person, one request at a time, and nothing to
install. It answers only calls from its own page.
"""
