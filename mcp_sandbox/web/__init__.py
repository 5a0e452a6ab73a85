"""All that listens on TCP: who may come in, how much one user may ask, and what ends.

    uvicorn_server    Streamable HTTP: the SDK's application behind the guard
    guard             every request passes here before anything reads it
    in_flight         the requests being served, with the limits of each user
    passing_on        calls whose chat another server has
    tokens            bearer tokens of users, kept as hashes

What a request means is the server room's; this one knows of MCP the SDK's HTTP and its headers.
"""
