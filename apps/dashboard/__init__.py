"""The page where people look at runs, and the REST interface, in a process of its own."""
