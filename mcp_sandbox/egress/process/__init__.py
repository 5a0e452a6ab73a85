"""The process of the ways out: what reads the bytes of strangers, behind walls of its own.

    child            its entry: serves what the server hands over, until that ends
    walls            what the kernel refuses to it
    keeper           what it asks the server, which has the keys
    proxy            serves one connection out of a sandbox
    http_requests    the requests inside the TLS of a host that may only be read or gets a secret
    mask             finds secrets in answers
    gateway          the way of an agent's run to its model service
    visitors         who comes to a preview

It has no key of the authority, seed, token, file or engine. Everything is loaded before the walls
close, so it knows no library that is not needed for that.
"""
