"""Reports for people: curves made of characters, lines in logs."""
