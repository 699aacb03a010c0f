"""Apps around the core, each in a folder with its commands and tests. `COMMANDS` of an app lists them by heading of
`paceline --help`; entry points find them. Nothing else imports apps."""
