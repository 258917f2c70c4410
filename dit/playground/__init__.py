"""A page to try prompts on: `python -m dit.playground CKPT`, for this machine alone.

studio  requests of the page -> pictures and their intermediate steps
server  the page and its answers over HTTP; page.html is the whole page

It works for one person, one request at a time. The server (dit/report/local_server.py) answers only
calls from its own page.
"""
