"""What may leave a sandbox, and what lets it leave.

    targets      a host and a port that a program inside asks for, and its public addresses
    rules        which rule lets it pass; `settings` reads the operator's
    authority    the certificates of hosts whose connections are opened
    secrets      values that requests get on the way out, and what their process may have of them
    ways_out     starts the process that serves connections, and hands them over
    link         the messages between the two
    process/     what runs in that process, behind walls of its own

What comes from inside is hostile, every byte of it. What cannot be judged is refused: an empty
list lets nothing pass. It knows no chats' sandboxes: a connection is a stream of bytes.
"""
