"""Apps around the core: each in a folder with its commands and tests, found by entry points. Nothing else imports them."""
