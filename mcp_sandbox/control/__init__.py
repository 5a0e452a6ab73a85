"""The HTTP API by which a platform steers chats and works in their sandboxes.

work    commands, files and previews of one session
"""
