"""Outside harnesses as drivers of a served model: `paceline eval --with`."""
