"""Reports on a run: writes its events, metrics and files, and explains stalls."""
