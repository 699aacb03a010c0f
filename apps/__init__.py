"""Apps around the core, each a folder with its commands. An app's `COMMANDS` has them by heading of `paceline --help`;
entry points find the apps. Nothing else imports apps."""
