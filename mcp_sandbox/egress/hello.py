"""Which host a TLS client asks for: a bounded parser of its first message. Pure."""


def named_host(data: bytes) -> str | None:
    """Return the host that a ClientHello names (SNI), None while more of it has to come.

    `data` is what came so far, from the first byte on.

    Raises:
        RefusedError: it names none or several, is none, or is larger than 16 KiB.
    """
    raise NotImplementedError
