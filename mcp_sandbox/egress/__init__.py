"""What may leave a sandbox, and the proxy that lets it leave.

    targets    the host and port that a program inside asks for
    rules      which rule allows or refuses a target
    addresses  the addresses of an allowed target: only public ones are dialled
    hello      the host that a TLS client names
    proxy      one connection, from the request to the last byte
    opened     plain HTTP, and HTTP inside TLS that the proxy terminates to check or add to it
    authority  the certificates for that; secrets, masking: values added, and hidden in answers
Every byte from inside is hostile; what cannot be judged is refused. This package knows no
sandboxes and no runner: a connection is a stream of bytes.
"""
