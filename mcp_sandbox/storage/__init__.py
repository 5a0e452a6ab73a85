"""What servers and platforms share: backups of chats in an object store, and keys in Redis.

    objects   one bucket, by the library of object stores; its errors in our words
    backups   what is stored of a chat there
    descent   which of it counts, where it was saved in several places
    redis     where a platform reads that the sandbox of a session is made, and servers agree
    leases    which server answers for a chat, and when it lets go
    breaker   leaves a service alone for a while that has failed

Imported only where `storage` or `fleet` is configured. Knows no sandbox: what packs is handed in.
"""
