"""Contains the apps around the core. Each app is a folder with its commands. An app's `COMMANDS` maps a heading of
`paceline --help` to the commands below it; entry points find the apps. Nothing else imports apps."""
