"""One module a command: what it asks of the rooms below, and the status it exits with."""
