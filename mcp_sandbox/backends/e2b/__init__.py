"""Sandboxes of the service E2B, or of an installation of it: virtual machines somewhere else.

    backend   makes, finds and ends them, and brings the runner into them
    client    the only file that talks to E2B's library; a connection to a runner over it

They hold the files of their chats. E2B pauses one that no server has held for `e2b.timeout`.
"""
