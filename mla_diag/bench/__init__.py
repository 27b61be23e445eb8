"""Before and after: what a kernel takes, and what a server's users feel."""
