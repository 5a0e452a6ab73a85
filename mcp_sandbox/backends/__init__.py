"""Where a sandbox lives: backends start a runner in isolation and open byte channels to it.

docker: a hardened container per sandbox. bubblewrap: unprivileged namespaces, no engine needed;
unsafe-local is the same with its walls off. They share the two protocols in base.py and what is
beside it (sandbox_records, local_socket, runner_copy); none knows chats, files or tools.
"""
