"""Training of EAGLE heads, MTP heads and block drafters for an existing target."""
