"""What outlives a machine: backups of chats in an object store.

    objects   one bucket, by the library of object stores; its errors in our words
    backups   what is stored of a chat there, and when it counts

Imported only where `storage` is configured. Knows no sandbox: what packs and unpacks is handed in.
"""
