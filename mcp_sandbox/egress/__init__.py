"""What may leave a sandbox, and the proxy that lets it leave.

    targets          a host and a port that a program inside asks for, and its public addresses
    rules            which rule lets it pass
    proxy            serves one connection
    http_requests    the requests inside the TLS of a host that may only be read or gets a secret
    authority        the certificates for that
    secrets          values that requests get on the way out, masked on the way back

What comes from inside is hostile, every byte of it. What cannot be judged is refused: an empty
list lets nothing pass. It knows no sandboxes and no runner: a connection is a stream of bytes.
"""
