"""A page to try prompts on: `python -m dit.playground CKPT`, for this machine alone.

requests  what the page asks for -> checked options
studio    open checkpoints, with and without adapters -> pictures, and the way to them
server    the page and its answers over HTTP; page.html is all of the page

It works for one person, one request at a time. The server (dit/report/local_server.py)
answers only calls from its own page.
"""
