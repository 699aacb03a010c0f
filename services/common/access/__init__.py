"""Access to calls: who makes one, by which token, and which roles may."""
