"""The command line: the only place that prints. Each command is a module of its own, imported when it is called."""
