"""What every command has in common: the kinds of its options, and how it ends."""
