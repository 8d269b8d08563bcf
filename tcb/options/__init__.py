"""What a call asks for: generation options, read once, honoured or refused by name."""
