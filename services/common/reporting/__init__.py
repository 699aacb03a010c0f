"""Reports for people: tables and charts in text, lines in logs."""
