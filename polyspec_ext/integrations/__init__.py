"""Where a chain plugs into other programs; each module imports what it plugs into."""
