"""A page to try prompts on: `python -m dit.playground CKPT`, for this machine alone.

studio  what the page asks for, with open checkpoints -> pictures, and the way to them
server  the page and its answers over HTTP; page.html is all of the page

It works for one person, one request at a time. The server (dit/report/local_server.py)
answers only calls from its own page.
"""
