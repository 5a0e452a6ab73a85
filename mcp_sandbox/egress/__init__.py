"""What may leave a sandbox, and the proxy that lets it leave.

A *target* is a host and a port that a program inside asks for; a *rule* lets it pass or not; its
*addresses* are looked up only then, and only public ones are dialled. `targets`, `rules`, `hello`
and `addresses` decide; `proxy` serves one connection, and `opened` the requests inside the TLS of
a host that may only be read or that gets a secret.

What comes from inside is hostile, every byte of it. What cannot be judged is refused: an empty
list lets nothing pass. It knows no sandboxes and no runner: a connection is a stream of bytes.
"""
