"""Names that other training libraries use, and Paceline's names for the same things."""
