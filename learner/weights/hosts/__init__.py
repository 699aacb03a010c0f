"""Publishing weights by host: each rank stages its shards in its host's memory, and agents bring them to the other hosts."""
