"""Where a sandbox lives: backends start a runner in isolation and open byte channels to it.

docker: a hardened container per sandbox. bubblewrap: unprivileged namespaces, no engine needed.
unsafe-local: the real runner as a plain process, for this project's own tests. They share the
two protocols in base.py and nothing else; none of them knows chats, files or tools.
"""
