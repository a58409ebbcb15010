"""The `lptune` command: one file per subcommand, nothing heavy imported before a command needs it."""
