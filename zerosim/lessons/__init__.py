"""What the course notebooks draw, and where they stop a run: what would be machinery in a cell."""
