"""Several servers that share chats: real daemons, a real Redis, a real object store."""
